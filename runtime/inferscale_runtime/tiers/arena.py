"""The DRAM arena: which segments lie where in the slab (API process only).

Segments are allocated in whole rows, first fit; the least recently used unpinned segments make
room. A segment is pinned while any lease uses it. All methods are thread-safe and short: reading
from disk happens outside the lock.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from inferscale_runtime.tiers.slab import (
    LEASE_ACTIVE,
    LEASE_DONE,
    LEASE_FREE,
    LEASE_NEW,
    NUM_LEASES,
)

UNSEEN_LEASE_SECONDS = 300.0
"""A lease that the engine never saw is taken back after this time (arbitrary; a request reaches
the engine within one step). The scheduler side checks the generation, so a late request goes as
text."""


@dataclass(slots=True)
class _Entry:
    start: int
    rows: int
    pins: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """A request's hold on its segments.

    Attributes:
        slot: Index into the leases file.
        generation: Value that the slot had when the lease was given.
        runs: ``(first row, rows)`` of each segment, in prompt order.
        keys: The segments.
    """

    slot: int
    generation: int
    runs: tuple[tuple[int, int], ...]
    keys: tuple[str, ...]


class Arena:
    """Allocation of the slab."""

    def __init__(self, slab: torch.Tensor, leases: npt.NDArray[np.int64]) -> None:
        self._slab = slab
        self._leases = leases
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._free: list[tuple[int, int]] = [(0, slab.shape[0])]
        self._free_slots = list(range(NUM_LEASES - 1, -1, -1))
        self._ended: dict[int, tuple[Lease, float]] = {}
        self.evictions = 0

    @property
    def used_rows(self) -> int:
        """Rows that hold a segment."""
        with self._lock:
            return sum(entry.rows for entry in self._entries.values())

    @property
    def pinned_rows(self) -> int:
        """Rows that a lease (or a permanent pin) keeps in place."""
        with self._lock:
            return sum(entry.rows for entry in self._entries.values() if entry.pins)

    def resident(self, keys: Sequence[str]) -> set[str]:
        """Which of the keys are in the slab."""
        with self._lock:
            return {key for key in keys if key in self._entries}

    def put(self, key: str, kv: torch.Tensor, *, pin: bool = False) -> bool:
        """Copies a segment into the slab.

        Args:
            key: Segment key.
            kv: ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]`` of the slab's dtype.
            pin: Keep it for good (the preamble).

        Returns:
            False when there is no room beside pinned segments.
        """
        with self._lock:
            self._collect()
            if key in self._entries:
                self._entries[key].pins += pin
                return True
            start = self._allocate(kv.shape[0])
            if start is None:
                return False
            # Inside the lock: a segment must not be visible before its bytes are.
            self._slab[start : start + kv.shape[0]].copy_(kv)
            self._entries[key] = _Entry(start, kv.shape[0], int(pin))
            return True

    def acquire(self, keys: Sequence[str]) -> Lease | None:
        """Pins segments for one request.

        Args:
            keys: In prompt order.

        Returns:
            The lease, or None when a segment is not resident or no lease is free.
        """
        with self._lock:
            self._collect()
            if not self._free_slots or any(key not in self._entries for key in keys):
                return None
            runs = []
            for key in keys:
                entry = self._entries[key]
                entry.pins += 1
                self._entries.move_to_end(key)
                runs.append((entry.start, entry.rows))
            slot = self._free_slots.pop()
            generation = int(self._leases[slot, 0]) + 1
            self._leases[slot] = (generation, LEASE_NEW)
            return Lease(slot, generation, tuple(runs), tuple(keys))

    def end(self, lease: Lease, *, submitted: bool) -> None:
        """The HTTP side of a request is over; the pins go when the engine is done too.

        Args:
            lease: From ``acquire``.
            submitted: False when the request was refused before it reached the engine.
        """
        with self._lock:
            if self._leases[lease.slot, 0] != lease.generation:
                return  # ended before; the slot may belong to another request by now
            if not submitted and self._leases[lease.slot, 1] == LEASE_NEW:
                self._release(lease)
                return
            self._ended[lease.slot] = (lease, time.monotonic())
            self._collect()

    def _collect(self) -> None:
        now = time.monotonic()
        for lease, since in list(self._ended.values()):
            state = self._leases[lease.slot, 1]
            unseen = state == LEASE_NEW and now - since > UNSEEN_LEASE_SECONDS
            if state == LEASE_DONE or unseen:
                del self._ended[lease.slot]
                self._release(lease)

    def _release(self, lease: Lease) -> None:
        self._leases[lease.slot] = (lease.generation + 1, LEASE_FREE)
        self._free_slots.append(lease.slot)
        for key in lease.keys:
            self._entries[key].pins -= 1

    def _allocate(self, rows: int) -> int | None:
        start = self._take(rows)
        if start is not None:
            return start
        if self._largest_span() < rows:
            return None  # pinned segments lie in the way: evict nothing in vain
        for key in [key for key, entry in self._entries.items() if not entry.pins]:
            entry = self._entries.pop(key)
            self._give(entry.start, entry.rows)
            self.evictions += 1
            start = self._take(rows)
            if start is not None:
                return start
        return None

    def _largest_span(self) -> int:
        """Most rows in one piece that evicting every unpinned segment would give."""
        pinned = sorted((e.start, e.rows) for e in self._entries.values() if e.pins)
        edges = [*pinned, (self._slab.shape[0], 0)]
        largest, begin = 0, 0
        for start, rows in edges:
            largest = max(largest, start - begin)
            begin = start + rows
        return largest

    def _take(self, rows: int) -> int | None:
        for index, (start, size) in enumerate(self._free):
            if size >= rows:
                rest = [(start + rows, size - rows)] if size > rows else []
                self._free[index : index + 1] = rest
                return start
        return None

    def _give(self, start: int, rows: int) -> None:
        merged: list[tuple[int, int]] = []
        for begin, size in sorted([*self._free, (start, rows)]):
            if merged and merged[-1][0] + merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((begin, size))
        self._free = merged


def activate_lease(leases: npt.NDArray[np.int64], slot: int, generation: int) -> bool:
    """Engine side: marks a lease as in use.

    Returns:
        False when it was taken back meanwhile; the request must go as text.
    """
    if not 0 <= slot < NUM_LEASES or leases[slot, 0] != generation:
        return False
    if leases[slot, 1] not in (LEASE_NEW, LEASE_ACTIVE):
        return False
    leases[slot, 1] = LEASE_ACTIVE
    return bool(leases[slot, 0] == generation)


def finish_lease(leases: npt.NDArray[np.int64], slot: int, generation: int) -> None:
    """Engine side: the request is gone; the API process may free its segments."""
    if leases[slot, 0] == generation:
        leases[slot, 1] = LEASE_DONE
