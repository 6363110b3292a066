"""Whether a server is ready, and waking the model while somebody waits for one.

One task looks and wakes for all waiting requests together; it ends with the last of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from inferscale_operator.activator.metrics import ActivatorMetrics

LOOK_SECONDS = 0.25
WAKE_SECONDS = 5.0
"""How often the size is looked at while no server is ready: somebody may have made it 0 again."""
TRUST_SECONDS = 2.0
"""How long a server that was ready counts as ready without another look."""

Find = Callable[[], Awaitable[str | None]]
"""URL of a ready server without a path; None when there is none."""

Wake = Callable[[], Awaitable[None]]
"""Sees to it that the model's size is not 0; errors are ``WakeError``."""

_log = logging.getLogger(__name__)


class WakeError(Exception):
    """The size could not be read or written; the message says why."""


class Servers:
    """The servers of one model.

    Args:
        find: Looks for a ready one.
        wake: Makes the model have some.
        metrics: Figures.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        find: Find,
        wake: Wake,
        metrics: ActivatorMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._wake = wake
        self._metrics = metrics
        self._clock = clock
        self._address: str | None = None
        self._seen_at = float("-inf")
        self._ready = asyncio.Event()
        self._waiting = 0
        self._finding = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def ready_now(self) -> str | None:
        """A ready server, or None; wakes nobody."""
        # One look for all who come together.
        async with self._finding:
            trust = LOOK_SECONDS if self._address is None else TRUST_SECONDS
            if self._clock() - self._seen_at > trust:
                self._take(await self._find())
            return self._address

    async def wait(self) -> str:
        """Waits until a server is ready, and wakes the model meanwhile."""
        self._waiting += 1
        try:
            while (address := await self.ready_now()) is None:
                if self._watch is None or self._watch.done():
                    self._watch = asyncio.create_task(self._look(), name="waking")
                await self._ready.wait()
            return address
        finally:
            self._waiting -= 1

    def lost(self) -> None:
        """The server that was ready does not answer."""
        self._take(None)

    async def close(self) -> None:
        """Ends looking."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    def _take(self, address: str | None) -> None:
        self._address, self._seen_at = address, self._clock()
        if address is None:
            self._ready.clear()
        else:
            self._ready.set()

    async def _look(self) -> None:
        began, last_wake = self._clock(), float("-inf")
        while self._waiting:
            self._take(await self._find())
            if self._address is not None:
                self._metrics.wake_seconds.observe(self._clock() - began)
                return
            if self._clock() - last_wake >= WAKE_SECONDS:
                last_wake = self._clock()
                await self._try_to_wake()
            await asyncio.sleep(LOOK_SECONDS)

    async def _try_to_wake(self) -> None:
        try:
            await self._wake()
        except WakeError as error:
            self._metrics.wake_errors.inc()
            _log.warning("the model cannot be woken now: %s", error, extra={"action": "wake"})
