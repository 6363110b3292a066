"""Token buckets: how often a caller, or a user, may ask (pure but for its clock)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_BUCKETS = 65_536
"""The least recently used are forgotten, that is full again (arbitrary; about 10 MB)."""


class TokenBuckets:
    """One bucket for each name.

    Args:
        per_minute: How fast a bucket fills.
        burst: How much it holds, and holds at first.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, per_minute: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = per_minute / 60
        self._burst = float(burst)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str) -> float:
        """Takes one token.

        Args:
            name: Of the bucket.

        Returns:
            0.0, or how many seconds to wait when the bucket is empty; nothing is taken then.
        """
        now = self._clock()
        level, since = self._buckets.pop(name, (self._burst, now))
        level = min(self._burst, level + (now - since) * self._rate)
        wait = 0.0 if level >= 1 else (1 - level) / self._rate
        self._buckets[name] = (level if wait else level - 1, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return wait
