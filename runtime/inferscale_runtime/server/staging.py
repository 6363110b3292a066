"""Disk to DRAM: reads missing segments into the arena (API process, in threads)."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from inferscale_runtime.errors import DamagedStoreError, StoreError
from inferscale_runtime.server import metrics
from inferscale_runtime.server.users import UserView
from inferscale_runtime.store.records import Segment
from inferscale_runtime.store.store import Store
from inferscale_runtime.store.stored import StoredSegment
from inferscale_runtime.store.tensors import byte_view
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tracing import annotate, traced

logger = logging.getLogger("vllm.inferscale.staging")

LINE_FACTOR = 5
"""How often the timeout a request waits in all while the store reads for those before it
(arbitrary)."""


class Staging:
    """One reader for each segment, however many requests wait for it.

    Args:
        store: Where the segments are.
        name: The store's name.
        arena: Where they go.
        timeout_seconds: How long a request waits while nothing is read; see ``patience``.
    """

    def __init__(self, store: Store, name: str, arena: Arena, timeout_seconds: float) -> None:
        self._store = store
        self._name = name
        self._arena = arena
        self._timeout = timeout_seconds
        self._running: dict[str, asyncio.Future[str | None]] = {}
        self._progress = 0.0  # monotonic time at which something was last read
        # First come, first served, and few at a time: side by side all would be late together.
        self._readers = ThreadPoolExecutor(_readers(store), thread_name_prefix="inferscale-stage")

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
            loop = asyncio.get_running_loop()
            task = loop.run_in_executor(self._readers, self.read, user, view, new)
            for segment in new:
                self._running[segment.key] = task
            task.add_done_callback(lambda _: [self._running.pop(s.key, None) for s in new])
        waiting = {self._running[s.key] for s in missing if s.key in self._running}
        began, failed = time.monotonic(), None
        while waiting:
            left = patience(began, self._progress, time.monotonic(), self._timeout)
            if left <= 0:
                return "timeout"
            done, waiting = await asyncio.wait(waiting, timeout=left)
            failed = next((reason for task in done if (reason := task.result())), failed)
        return failed

    def read(self, user: str, view: UserView, segments: list[Segment]) -> str | None:
        """Reads segments into the arena; blocks. Returns why the store did not answer, or None."""
        started = time.perf_counter()
        sizes: list[int] = []
        try:
            with self._store.holding_files():
                found = self._store.find_segments(user, segments)
                for segment, source in zip(segments, found, strict=True):
                    sizes.append(self._stage(user, view, segment, source))
                    self._progress = time.monotonic()
        except Exception as error:
            # Object storage may be away for a while, and each has errors of its own: text now,
            # another try with the next request. Messages of other libraries may quote signed URLs.
            what = error if isinstance(error, StoreError) else type(error).__name__
            left = len(segments) - len(sizes)
            logger.warning("store '%s': %d segments could not be read: %s", self._name, left, what)
            metrics.UNUSABLE_SEGMENTS.labels("unreadable").inc(left)
            return "segment_unreadable"
        seconds = time.perf_counter() - started
        metrics.STAGING_SECONDS.observe(seconds)
        self._arena.stats.staged(self._name, sum(map(bool, sizes)), sum(sizes), seconds)
        return None

    def _stage(
        self,
        user: str,
        view: UserView,
        segment: Segment,
        source: StoredSegment | DamagedStoreError,
    ) -> int:
        """Reads one segment into the arena; returns its bytes, 0 when it is not there."""
        try:
            if isinstance(source, DamagedStoreError):
                raise source
            there = self._put(segment, source)
        except DamagedStoreError:
            if self._store.manifest_mark(user) != view.mark:
                # Nothing is damaged: the user was written meanwhile, and files were replaced. The
                # next request looks where the segment is now.
                metrics.UNUSABLE_SEGMENTS.labels("missing").inc()
                return 0
            view.damaged.add(segment.key)
            metrics.UNUSABLE_SEGMENTS.labels("damaged").inc()
            return 0
        if not there:
            metrics.UNUSABLE_SEGMENTS.labels("full").inc()
            return 0
        if segment.key in view.retired:
            self._arena.discard([segment.key])  # It went while it was read.
        return source.nbytes

    def _put(self, segment: Segment, source: StoredSegment) -> bool:
        if not self._arena.takes(source.layout):
            return self._arena.put(segment.key, source.kv(), store=self._name)

        def write(runs: Sequence[torch.Tensor]) -> None:
            source.read_into([byte_view(run) for run in runs])

        return self._arena.fill(segment.key, segment.num_tokens, write, store=self._name)


def patience(began: float, progress: float, now: float, timeout: float) -> float:
    """How long a request may wait on for its segments; 0 or less when it goes as text.

    A store that does not answer is given up after the timeout. One that reads for others is worth
    waiting for in line: going as text takes the engine's time from everybody.

    Args:
        began: When the request began to wait, seconds.
        progress: When the store last gave a segment to anybody, seconds.
        now: Seconds.
        timeout: Seconds without progress; ``LINE_FACTOR`` times that in all.
    """
    return min(max(began, progress) + timeout, began + LINE_FACTOR * timeout) - now


def _readers(store: Store) -> int:
    """Users whose segments are read at once (arbitrary): memory copies, or answers of a network."""
    return min(4, len(os.sched_getaffinity(0))) if store.local else 8


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
