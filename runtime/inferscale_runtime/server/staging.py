"""Disk to DRAM: reads missing segments into the arena (API process, in threads)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.server import metrics
from inferscale_runtime.server.users import UserView
from inferscale_runtime.store.records import Segment
from inferscale_runtime.store.store import Store
from inferscale_runtime.tiers.arena import Arena


class Staging:
    """One reader for each segment, however many requests wait for it."""

    def __init__(self, store: Store, arena: Arena, timeout_seconds: float) -> None:
        self._store = store
        self._arena = arena
        self._timeout = timeout_seconds
        self._running: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, user: str, view: UserView, segments: Sequence[Segment]) -> str | None:
        """Brings segments into the arena.

        Args:
            user: Whose segments.
            view: Learns which segments are damaged.
            segments: What the request wants.

        Returns:
            None when the time did not run out; else ``"timeout"``, and the reading goes on.
        """
        resident = self._arena.resident([segment.key for segment in segments])
        missing = [s for s in segments if s.key not in resident and s.key not in view.damaged]
        new = [s for s in missing if s.key not in self._running]
        if new:
            task = asyncio.create_task(asyncio.to_thread(self._read, user, view, new))
            for segment in new:
                self._running[segment.key] = task
            task.add_done_callback(lambda _: [self._running.pop(s.key, None) for s in new])
        waiting = {self._running[s.key] for s in missing if s.key in self._running}
        if not waiting:
            return None
        _, late = await asyncio.wait(waiting, timeout=self._timeout)
        return "timeout" if late else None

    def _read(self, user: str, view: UserView, segments: list[Segment]) -> None:
        started = time.perf_counter()
        for segment, kv in zip(segments, self._store.read_segments(user, segments), strict=True):
            if isinstance(kv, DamagedStoreError):
                view.damaged.add(segment.key)
                metrics.UNUSABLE_SEGMENTS.labels("damaged").inc()
            elif not self._arena.put(segment.key, kv):
                metrics.UNUSABLE_SEGMENTS.labels("full").inc()
        metrics.STAGING_SECONDS.observe(time.perf_counter() - started)
