"""The GPU arena: one rank's copies of hot segments, outside vLLM's memory (worker process).

It holds copies of what lies in the DRAM arena and nothing else. A run of rows is known by its
stamp, which the API process changes whenever it writes or frees the rows; a copy whose stamp is no
longer current is never read, and ``sweep`` forgets it. A request's lease keeps rows and stamps in
place while they are read here.

What comes in is decided by use: a run takes free room, or the room of least recently used runs that
were asked for less often. On a CUDA device the bytes from DRAM come over a stream of their own,
beside the forward that is still running, and the reader's stream waits for them; everything else is
done on the reader's stream, so that no copy is overwritten before it was read. On the CPU the same
code runs without streams.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inferscale_runtime.tiers.slab import rank_rows
from inferscale_runtime.tiers.spans import FreeSpans

Run = tuple[int, int]
"""``(first row, rows)`` in the DRAM slab."""

MAX_COUNT = 15
COUNTERS = 1 << 16
AGE_AFTER = 1 << 15
"""After so many uses all counts are halved, so that what was hot before makes room (arbitrary:
about three minutes at ten requests a second)."""


class UseCounts:
    """How often each run was asked for lately: small counters that age, shared by hash.

    Two rows of counters; the smaller one counts, so that two runs seldom look like one.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((2, COUNTERS), np.uint8)
        self._uses = 0

    def _places(self, stamp: int) -> tuple[int, int]:
        return stamp % COUNTERS, (stamp * 0x9E3779B1 >> 16) % COUNTERS

    def add(self, stamp: int) -> None:
        """Counts one use."""
        for row, place in enumerate(self._places(stamp)):
            if self._counts[row, place] < MAX_COUNT:
                self._counts[row, place] += 1
        self._uses += 1
        if self._uses >= AGE_AFTER:
            self._counts >>= 1
            self._uses //= 2

    def of(self, stamp: int) -> int:
        """Uses lately, at most 15."""
        first, second = self._places(stamp)
        return int(min(self._counts[0, first], self._counts[1, second]))


@dataclass(slots=True)
class _Copy:
    source: int
    rows: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """What the arena did since the start.

    Attributes:
        allocated_bytes: Memory that it took from the device.
        budget_bytes: Memory that copies may take now.
        used_bytes: Memory that copies take.
        hits: Runs found on the device.
        misses: Runs copied from DRAM.
        copied_bytes: Bytes copied from DRAM.
        evictions: Copies that made room.
    """

    allocated_bytes: int
    budget_bytes: int
    used_bytes: int
    hits: int
    misses: int
    copied_bytes: int
    evictions: int


class DeviceArena:
    """Copies of runs on one device; used by one thread.

    Args:
        slab: The DRAM slab, ``[num_rows, num_layers, 2, num_kv_heads, head_dim]`` or quantised
            rows, which stay so.
        stamps: ``[num_rows]`` int64; a run's stamp stands at its first row, 0 means free.
        heads: This rank's KV heads.
        budget_bytes: Memory to take from the device; whole rows.
        device: Where to.
    """

    def __init__(
        self,
        slab: torch.Tensor,
        stamps: npt.NDArray[np.int64],
        heads: slice,
        budget_bytes: int,
        device: torch.device,
    ) -> None:
        self._slab = slab
        self._stamps = stamps
        self._heads = heads
        self._device = device
        one_row = rank_rows(slab[:1], heads)
        self.row_bytes = one_row.numel() * slab.element_size()
        num_rows = min(budget_bytes // self.row_bytes, slab.shape[0])
        self._store = torch.empty((num_rows, *one_row.shape[1:]), dtype=slab.dtype, device=device)
        self._free = FreeSpans(num_rows)
        self._budget = num_rows
        self._used = 0
        self._copies: OrderedDict[int, _Copy] = OrderedDict()
        self._counts = UseCounts()
        self._side = _make_stream(device)
        self._hits = self._misses = self._copied = self._evictions = 0

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._device

    @property
    def figures(self) -> DeviceFigures:
        """Figures since the start."""
        size = self.row_bytes
        return DeviceFigures(
            self._store.shape[0] * size,
            self._budget * size,
            self._used * size,
            self._hits,
            self._misses,
            self._copied,
            self._evictions,
        )

    def set_budget(self, budget_bytes: int | None) -> None:
        """Changes how much copies may take; at most what was allocated, which None means."""
        total = int(self._store.shape[0])
        self._budget = total if budget_bytes is None else min(total, budget_bytes // self.row_bytes)
        while self._used > self._budget:
            self._evict(next(iter(self._copies)))

    def sweep(self) -> int:
        """Forgets copies of rows that were freed or written again, for good.

        Returns:
            How many.
        """
        old = [stamp for stamp, copy in self._copies.items() if self._stamps[copy.source] != stamp]
        for stamp in old:
            self._forget(stamp)
        return len(old)

    def fetch(self, runs: Sequence[Run]) -> torch.Tensor:
        """Reads runs, from the device where they are there.

        The rows must be held by a lease until the returned tensor has been computed.

        Args:
            runs: In prompt order.

        Returns:
            ``[rows of all runs, num_layers, 2, heads of this rank, head_dim]``, or quantised rows
            of these heads, on the device, ready for work on the current stream.
        """
        keep: set[int] = set()
        missing: list[tuple[int, Run]] = []
        found: list[int] = []
        places: list[int] = []
        done = 0
        for start, rows in runs:
            copy = self._find((start, rows))
            if copy is None:
                missing.append((done, (start, rows)))
            else:
                keep.add(int(self._stamps[start]))
                found += range(done, done + rows)
                places += _rows_of(copy.runs)
            done += rows
        brought = self._bring([run for _, run in missing])
        if not found:
            result = brought
        else:
            result = torch.empty(
                (done, *self._store.shape[1:]), dtype=self._store.dtype, device=self._device
            )
            self._move(places, found, self._store, result)
            wanted = _rows_of((offset, run[1]) for offset, run in missing)
            self._move(list(range(len(wanted))), wanted, brought, result)
        first = 0
        for _, run in missing:
            self._admit(run, brought[first : first + run[1]], keep)
            first += run[1]
        return result

    def _find(self, run: Run) -> _Copy | None:
        stamp = int(self._stamps[run[0]])
        self._counts.add(stamp)
        copy = self._copies.get(stamp) if stamp else None
        if copy is None or (copy.source, copy.rows) != run:
            return None
        self._copies.move_to_end(stamp)
        self._hits += 1
        return copy

    def _move(
        self, places: list[int], targets: list[int], source: torch.Tensor, result: torch.Tensor
    ) -> None:
        rows = source.index_select(0, torch.tensor(places, device=self._device, dtype=torch.int64))
        index = torch.tensor(targets, device=self._device, dtype=torch.int64)
        result.index_copy_(0, index, rows)

    def _bring(self, runs: Sequence[Run]) -> torch.Tensor:
        """Copies runs from DRAM; ``[rows of all runs, ...]`` on the device."""
        shape = (sum(rows for _, rows in runs), *self._store.shape[1:])
        with torch.cuda.stream(self._side) if self._side else nullcontext():
            brought = torch.empty(shape, dtype=self._store.dtype, device=self._device)
            done = 0
            for start, rows in runs:
                source = rank_rows(self._slab[start : start + rows], self._heads)
                if self._side is not None and not source.is_contiguous():
                    # A strided copy would wait; torch keeps pinned buffers for reuse.
                    source = source.contiguous().pin_memory()
                brought[done : done + rows].copy_(source, non_blocking=True)
                done += rows
        if self._side is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._side)
            brought.record_stream(current)
        self._misses += len(runs)
        self._copied += done * self.row_bytes
        return brought

    def _admit(self, run: Run, rows: torch.Tensor, keep: set[int]) -> None:
        stamp, count = int(self._stamps[run[0]]), run[1]
        if not stamp or stamp in self._copies or not self._make_room(stamp, count, keep):
            return
        pieces = self._free.take(count)
        assert pieces is not None, "the budget is larger than the device's store"
        done = 0
        for first, size in pieces:
            self._store[first : first + size].copy_(rows[done : done + size])
            done += size
        self._used += count
        self._copies[stamp] = _Copy(run[0], count, pieces)
        keep.add(stamp)

    def _make_room(self, stamp: int, rows: int, keep: set[int]) -> bool:
        """Evicts colder copies; nothing when they do not suffice."""
        victims, freed = [], 0
        uses = self._counts.of(stamp)
        candidates = iter(self._copies.items())
        while self._used - freed + rows > self._budget:
            victim = next(((s, c) for s, c in candidates if s not in keep), None)
            if victim is None:
                return False
            stale = self._stamps[victim[1].source] != victim[0]
            if not stale and self._counts.of(victim[0]) >= uses:
                return False
            victims.append(victim[0])
            freed += victim[1].rows
        for old in victims:
            self._evict(old)
        return True

    def _evict(self, stamp: int) -> None:
        self._forget(stamp)
        self._evictions += 1

    def _forget(self, stamp: int) -> None:
        """Frees a copy and overwrites it: nobody looks here again when its fact is erased."""
        copy = self._copies.pop(stamp)
        # The first request makes the store in inference mode, and outside of it nobody may write.
        with torch.inference_mode():
            for start, rows in copy.runs:
                self._store[start : start + rows].zero_()
        self._used -= copy.rows
        self._free.give(copy.runs)


def _make_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _rows_of(runs: Iterable[Run]) -> list[int]:
    return [row for start, rows in runs for row in range(start, start + rows)]


def pin_slab(slab: torch.Tensor) -> bool:
    """Registers the slab's memory with CUDA, so that copies from it run beside the forward.

    Returns:
        False when the driver refuses (no CUDA, or a limit on locked memory); copies then work, but
        wait.
    """
    if not torch.cuda.is_available():
        return False
    size = math.prod(slab.shape) * slab.element_size()
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(slab.data_ptr(), size, 0)
    return int(code) == 0
