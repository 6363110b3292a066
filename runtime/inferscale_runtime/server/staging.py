"""Disk to DRAM: reads missing segments into the arena (API process, in threads)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from inferscale_runtime.errors import DamagedStoreError, StoreError
from inferscale_runtime.server import metrics
from inferscale_runtime.server.users import UserView
from inferscale_runtime.store.records import Segment
from inferscale_runtime.store.store import Store
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tracing import annotate, traced

logger = logging.getLogger("vllm.inferscale.staging")


class Staging:
    """One reader for each segment, however many requests wait for it.

    Args:
        store: Where the segments are.
        name: The store's name.
        arena: Where they go.
        timeout_seconds: How long a request waits.
    """

    def __init__(self, store: Store, name: str, arena: Arena, timeout_seconds: float) -> None:
        self._store = store
        self._name = name
        self._arena = arena
        self._timeout = timeout_seconds
        self._running: dict[str, asyncio.Task[str | None]] = {}

    @traced("memory.stage")
    async def ensure(self, user: str, view: UserView, segments: Sequence[Segment]) -> str | None:
        """Brings segments into the arena.

        Args:
            user: Whose segments.
            view: Learns which segments are damaged.
            segments: What the request wants.

        Returns:
            None when all was read; ``"timeout"`` when the reading goes on in the background, or
            ``"segment_unreadable"`` when the store did not answer.
        """
        resident = self._arena.resident([segment.key for segment in segments])
        missing = [s for s in segments if s.key not in resident and s.key not in view.damaged]
        annotate(segments=len(segments), missing=len(missing))
        new = [s for s in missing if s.key not in self._running]
        if new:
            task = asyncio.create_task(asyncio.to_thread(self.read, user, view, new))
            for segment in new:
                self._running[segment.key] = task
            task.add_done_callback(lambda _: [self._running.pop(s.key, None) for s in new])
        waiting = {self._running[s.key] for s in missing if s.key in self._running}
        if not waiting:
            return None
        done, late = await asyncio.wait(waiting, timeout=self._timeout)
        failed = next((reason for task in done if (reason := task.result())), None)
        return "timeout" if late else failed

    def read(self, user: str, view: UserView, segments: list[Segment]) -> str | None:
        """Reads segments into the arena; blocks. Returns why the store did not answer, or None."""
        started = time.perf_counter()
        try:
            read = self._store.read_segments(user, segments)
        except Exception as error:
            # Object storage may be away for a while, and each has errors of its own: text now,
            # another try with the next request. Messages of other libraries may quote signed URLs.
            what = error if isinstance(error, StoreError) else type(error).__name__
            logger.warning(
                "store '%s': %d segments could not be read: %s", self._name, len(segments), what
            )
            metrics.UNUSABLE_SEGMENTS.labels("unreadable").inc(len(segments))
            return "segment_unreadable"
        staged, size = 0, 0
        for segment, kv in zip(segments, read, strict=True):
            if isinstance(kv, DamagedStoreError):
                view.damaged.add(segment.key)
                metrics.UNUSABLE_SEGMENTS.labels("damaged").inc()
            elif not self._arena.put(segment.key, kv, store=self._name):
                metrics.UNUSABLE_SEGMENTS.labels("full").inc()
            else:
                staged, size = staged + 1, size + kv.nbytes
                if segment.key in view.retired:
                    self._arena.discard([segment.key])  # It went while it was read.
        seconds = time.perf_counter() - started
        metrics.STAGING_SECONDS.observe(seconds)
        self._arena.stats.staged(self._name, staged, size, seconds)
        return None


def shortfall(
    view: UserView, missing: int, wanted: set[str], resident: set[str], late: str | None
) -> str | None:
    """Why some of the wanted segments go as text, or None; counts them."""
    if missing:
        metrics.UNUSABLE_SEGMENTS.labels("missing").inc(missing)
    if late == "timeout":
        metrics.UNUSABLE_SEGMENTS.labels("timeout").inc()
    if wanted & view.damaged:
        return "segment_damaged"
    if late or missing:
        return late or "segment_missing"
    return "evicted" if resident != wanted else None
