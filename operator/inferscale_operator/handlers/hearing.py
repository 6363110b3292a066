"""Whether the watches tell what happens; found out by comparing lists with what was heard.

A watch may be quiet because nothing happens, so silence alone proves nothing. A comparison that
shows a change of which the watch has not told is a miss, and watching is started anew. A second
miss, with nothing told by the new watch in between, shows that it is deaf.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from inferscale_operator.desired.kinds import Kind

DEAF_AFTER = 2
"""Misses, with nothing told in between."""


class Hearing:
    """What is known about the watch of each kind.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_at: dict[str, float] = {}
        self._misses: dict[str, int] = {}

    def heard(self, kind: Kind) -> None:
        """The watch of a kind told of a change; the list that it begins with is none."""
        self._heard_at[kind.kind] = self._clock()
        self._misses.pop(kind.kind, None)

    def missed(self, kind: Kind) -> None:
        """A comparison showed a change of which the watch of a kind has not told."""
        self._misses[kind.kind] = self._misses.get(kind.kind, 0) + 1

    def deaf(self) -> str | None:
        """Why watching is taken to be deaf, or None."""
        kinds = sorted(kind for kind, count in self._misses.items() if count >= DEAF_AFTER)
        if not kinds:
            return None
        return f"the watch of {', '.join(kinds)} does not tell of changes that a list shows"

    def ages(self) -> dict[str, float]:
        """Seconds since the watch of each kind told of a change."""
        now = self._clock()
        return {kind: now - at for kind, at in sorted(self._heard_at.items())}
