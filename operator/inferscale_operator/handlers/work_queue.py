"""The work queue: keys of custom resources that have to be looked at.

A key is in the queue once, however often it is added; one worker at a time has it; a key that is
added while a worker has it comes again afterwards. First come, first served, so one busy resource
cannot hold the others up. One event loop only.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable

from inferscale_operator.cluster.cache import OwnerKey

FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 300.0
MOST_LOOKS_PER_SECOND = 5.0
"""Looks without an event, over all resources: with a thousand Jobs under way each one is looked at
less often, so that changes do not wait behind looks."""


class WorkQueue:
    """A deduplicating queue with delays and backoff.

    Args:
        clock: Monotonic seconds.
        jitter: A number in [0, 1) for each backoff.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._ready: OrderedDict[OwnerKey, float] = OrderedDict()
        self._running: dict[OwnerKey, float] = {}
        self._again: dict[OwnerKey, float] = {}
        self._timers: dict[OwnerKey, tuple[float, asyncio.TimerHandle]] = {}
        self._failures: dict[OwnerKey, int] = {}
        self._wakeup = asyncio.Event()
        self._finished_at = clock()
        self._closed = False

    def add(self, key: OwnerKey) -> None:
        """The key has to be looked at now."""
        self._cancel_timer(key)
        if key in self._running:
            self._again.setdefault(key, self._clock())
        elif key not in self._ready:
            self._ready[key] = self._clock()
            self._wakeup.set()

    def add_after(self, key: OwnerKey, seconds: float) -> None:
        """The key has to be looked at in some time, or earlier if that was asked before."""
        if seconds <= 0:
            self.add(key)
            return
        due = self._clock() + seconds
        known = self._timers.get(key)
        if known is not None and known[0] <= due:
            return
        self._cancel_timer(key)
        handle = asyncio.get_running_loop().call_later(seconds, self.add, key)
        self._timers[key] = (due, handle)

    def look_after(self, key: OwnerKey, seconds: float) -> None:
        """The key should be looked at in some time; later, where very many others are, too."""
        if seconds > 0:
            seconds = max(seconds, len(self._timers) / MOST_LOOKS_PER_SECOND)
        self.add_after(key, seconds)

    def retry(self, key: OwnerKey, at_least: float | None = None) -> float:
        """After a failure: the key comes again, later with each failure.

        Args:
            key: The key.
            at_least: What the server asked to wait.

        Returns:
            Seconds until then.
        """
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        longest = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(count, 30), LONGEST_BACKOFF_SECONDS)
        # Between half and the whole: many resources that failed together come back apart.
        seconds = max(longest * (0.5 + self._jitter() / 2), at_least or 0.0)
        self.add_after(key, seconds)
        return seconds

    def succeeded(self, key: OwnerKey) -> None:
        """The next failure of the key counts as its first."""
        self._failures.pop(key, None)

    def forget(self, key: OwnerKey) -> None:
        """The resource is gone: no timer and no count is kept."""
        self._cancel_timer(key)
        self._failures.pop(key, None)

    def close(self) -> None:
        """No key is handed out any more."""
        self._closed = True
        self._wakeup.set()

    async def get(self) -> OwnerKey | None:
        """The next key, of which the caller has to say ``done``; None when the queue is closed."""
        while not self._ready and not self._closed:
            self._wakeup.clear()
            await self._wakeup.wait()
        if self._closed:
            return None
        key, _ = self._ready.popitem(last=False)
        self._running[key] = self._clock()
        return key

    def done(self, key: OwnerKey) -> None:
        """The worker is through with the key."""
        self._running.pop(key, None)
        self._finished_at = self._clock()
        since = self._again.pop(key, None)
        if since is not None:
            self._ready[key] = since
            self._wakeup.set()

    @property
    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._ready) + len(self._again)

    @property
    def age_seconds(self) -> float:
        """How long the first key has waited."""
        first = min([*list(self._ready.values())[:1], *self._again.values()], default=None)
        return 0.0 if first is None else max(0.0, self._clock() - first)

    def hung(self, bound_seconds: float) -> str | None:
        """Why the workers are taken to hang, or None.

        They hang when one key has been worked at, or work has waited and nothing was finished,
        for longer than the bound. A long queue alone is no reason.
        """
        now = self._clock()
        for key, since in self._running.items():
            if now - since > bound_seconds:
                kind, namespace, name = key
                return f"{kind} {namespace}/{name} has been worked at for {now - since:.0f} s"
        idle = now - self._finished_at
        if self.age_seconds > bound_seconds and idle > bound_seconds:
            return f"{self.depth} keys wait and none was finished for {idle:.0f} s"
        return None

    def _cancel_timer(self, key: OwnerKey) -> None:
        known = self._timers.pop(key, None)
        if known is not None:
            known[1].cancel()
