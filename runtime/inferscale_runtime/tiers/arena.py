"""The DRAM arena: which segments lie where in the slab (API process only).

Segments are allocated in whole rows, in one piece where there is one. A segment is pinned while any
lease uses it; among the others ``eviction`` chooses who makes room. All methods are thread-safe and
short: reading from disk and copying into the slab happen outside the lock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from inferscale_runtime.packing.rows import PackedKV
from inferscale_runtime.store.kvfile import Layout
from inferscale_runtime.tiers.arena_use import ByteLimits, StoreUse
from inferscale_runtime.tiers.eviction import EvictionPolicy, Resident
from inferscale_runtime.tiers.form import SlabForm
from inferscale_runtime.tiers.leases import Hold, Lease
from inferscale_runtime.tiers.slab import LEASE_DONE, LEASE_FREE, LEASE_NEW, NUM_LEASES, copy_rows
from inferscale_runtime.tiers.spans import FreeSpans
from inferscale_runtime.tiers.stats import TierStats

UNSEEN_LEASE_SECONDS = 300.0
"""A lease that the engine never saw is taken back after this time (arbitrary; a request reaches
the engine within one step). The scheduler side checks the generation, so a late request goes as
text."""


class Arena:
    """Allocation of the slab.

    Args:
        slab: ``[num_rows, num_layers, 2, num_kv_heads, head_dim]``.
        leases: ``[NUM_LEASES, 2]`` int64.
        stats: Where lookups, staging and evictions are counted.
        stamps: ``[num_rows]`` int64, shared with the engine's processes; see ``slab``.
        form: Brings stored KV into the slab's form; None when it has it already.
    """

    def __init__(
        self,
        slab: torch.Tensor,
        leases: npt.NDArray[np.int64],
        stats: TierStats | None = None,
        stamps: npt.NDArray[np.int64] | None = None,
        form: SlabForm | None = None,
    ) -> None:
        self._slab = slab
        self._form = form
        self._leases = leases
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._entries: dict[str, Resident] = {}
        self._writing: set[str] = set()
        self._unwanted: set[str] = set()
        self._kept: Counter[str] = Counter()
        self._free = FreeSpans(slab.shape[0])
        self._policy = EvictionPolicy(slab.shape[0])
        self._stamps = np.zeros(slab.shape[0], np.int64) if stamps is None else stamps
        self._last_stamp = 0
        self._free_slots = list(range(NUM_LEASES - 1, -1, -1))
        self._held: dict[int, list[Resident]] = {}
        self._holds: set[Hold] = set()
        self._ended: dict[int, tuple[Lease, float]] = {}
        self.row_bytes = slab[:1].numel() * slab.element_size()
        self.stats = stats or TierStats()
        self.evictions = 0

    @property
    def used_rows(self) -> int:
        """Rows that hold a segment."""
        with self._lock:
            return self._policy.rows

    @property
    def pinned_rows(self) -> int:
        """Rows that a lease (or a permanent pin) keeps in place."""
        with self._lock:
            return self._policy.pinned

    @property
    def budget_bytes(self) -> int:
        """Bytes that segments may take together."""
        with self._lock:
            return self._policy.budget * self.row_bytes

    @property
    def slab_bytes(self) -> int:
        """Size of the slab, the largest budget."""
        return int(self._slab.shape[0]) * self.row_bytes

    def use_by_store(self) -> dict[str, StoreUse]:
        """What each store has in the arena."""
        with self._lock:
            return {name: self._use(name) for name in sorted(self._policy.stores)}

    def _use(self, store: str) -> StoreUse:
        rows, pinned, segments = self._policy.rows_of(store)
        limits = self._policy.limits_of(store)
        size = self.row_bytes
        ceiling = None if limits.ceiling is None else limits.ceiling * size
        return StoreUse(
            rows * size, pinned * size, segments, limits.floor * size, ceiling, limits.tier
        )

    def set_limits(self, budget_bytes: int | None, limits: Mapping[str, ByteLimits]) -> None:
        """Changes the budget and the stores' limits while requests run.

        What is over a limit and not pinned goes at once; what requests hold drains.

        Args:
            budget_bytes: At most the slab's size; None is the whole slab.
            limits: By store; a store that is not named has none.
        """
        size = self.row_bytes
        total = int(self._slab.shape[0])
        budget = total if budget_bytes is None else min(total, budget_bytes // size)
        rows = {name: limit.in_rows(size) for name, limit in limits.items()}
        with self._lock:
            self._policy.configure(budget, rows)
            self._collect()
            self._shed()

    def resident(self, keys: Sequence[str]) -> set[str]:
        """Which of the keys are in the slab."""
        with self._lock:
            return {key for key in keys if key in self._entries}

    def size_of(self, keys: Sequence[str]) -> int:
        """Bytes of those that are resident."""
        with self._lock:
            found = [self._entries[key] for key in {*keys} if key in self._entries]
            return sum(entry.rows for entry in found) * self.row_bytes

    def look_up(self, keys: Sequence[str], *, store: str = "") -> set[str]:
        """As ``resident`` for one request that is going to use them.

        Counts its hits and misses, and what is there becomes recent, so that reading the rest does
        not push it out.
        """
        with self._lock:
            found = {key for key in keys if key in self._entries}
            for key in found:
                self._policy.touch(self._entries[key])
        self.stats.looked_up(store, len(found), len({*keys} - found))
        return found

    def put(
        self, key: str, kv: torch.Tensor | PackedKV, *, pin: bool = False, store: str = ""
    ) -> bool:
        """Copies a segment into the slab.

        Args:
            key: Segment key.
            kv: ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]`` or quantised rows.
            pin: Keep it for good (the preamble).
            store: Whose limits it counts against.

        Returns:
            False when there is no room beside pinned segments and other stores' floors.
        """
        rows = self._rows(kv)
        return self.fill(key, len(rows), partial(copy_rows, rows), pin=pin, store=store)

    def takes(self, layout: Layout) -> bool:
        """Whether ``fill`` may be given a stored segment's bytes as they are."""
        return self._form is not None and self._form.takes(layout)

    def fill(
        self,
        key: str,
        num_rows: int,
        write: Callable[[Sequence[torch.Tensor]], None],
        *,
        pin: bool = False,
        store: str = "",
    ) -> bool:
        """As ``put`` for a segment that writes itself.

        Args:
            key: Segment key.
            num_rows: Its tokens.
            write: Given the rows of the slab, in one piece or several. What it raises is raised
                here, and the rows are wiped.
            pin: Keep it for good.
            store: Whose limits it counts against.
        """
        with self._lock:
            self._collect()
            while key in self._writing:
                self._written.wait()
            if key in self._entries:
                if pin:
                    self._policy.pin(self._entries[key])
                    self._kept[key] += 1
                return True
            entry = self._reserve(key, store, num_rows)
            if entry is None:
                return False
            self._writing.add(key)
        try:
            write([self._slab[start : start + count] for start, count in entry.runs])
        except BaseException:
            self._wipe(entry)
            with self._lock:
                self._end_writing(entry)
                self._drop(entry)
            raise
        with self._lock:
            # Only now: a segment must not be visible before its bytes are.
            wanted = self._end_writing(entry)
            if not pin or not wanted:
                self._policy.unpin(entry)
            if not wanted:
                self._wipe(entry)
                self._drop(entry)
                return False
            self._entries[key] = entry
            if pin:
                self._kept[key] += 1
            for hold in self._holds:
                self._keep_for(hold, key)
            self._shed()  # the budget may have shrunk meanwhile
            return True

    def _rows(self, kv: torch.Tensor | PackedKV) -> torch.Tensor:
        if self._form is not None:
            return self._form(kv)
        assert not isinstance(kv, PackedKV), "an arena of plain rows without a form"
        return kv

    def _end_writing(self, entry: Resident) -> bool:
        """Lets others see the key again; False when it was discarded meanwhile."""
        wanted = entry.key not in self._unwanted
        self._writing.discard(entry.key)
        self._unwanted.discard(entry.key)
        self._written.notify_all()
        return wanted

    def _reserve(self, key: str, store: str, rows: int) -> Resident | None:
        victims = self._policy.victims_for(store, rows)
        if victims is None:
            return None
        self._evict(victims)
        runs = self._free.take(rows)
        assert runs is not None, "the budget is larger than the slab"
        for start, _ in runs:
            self._last_stamp += 1
            self._stamps[start] = self._last_stamp
        entry = Resident(key, store, runs, rows, pins=1)
        self._policy.add(entry)
        return entry

    def discard(self, keys: Sequence[str]) -> int:
        """Forgets segments at once and wipes their rows; those that requests hold when they end.

        Returns:
            How many were resident.
        """
        with self._lock:
            self._unwanted |= self._writing & {*keys}
            found = [self._entries.pop(key) for key in {*keys} if key in self._entries]
            for entry in found:
                entry.erased = True
                for _ in range(self._kept.pop(entry.key, 0)):
                    self._policy.unpin(entry)
            idle = [entry for entry in found if not entry.pins]
            for entry in idle:  # Nobody may make room with rows that are being wiped.
                self._policy.pin(entry)
        for entry in idle:
            self._wipe(entry)
        with self._lock:
            self._let_go(idle)
        return len(found)

    def _wipe(self, entry: Resident) -> None:
        for start, rows in entry.runs:
            self._slab[start : start + rows].zero_()
        entry.erased = False

    @contextmanager
    def holding(self, keys: Sequence[str]) -> Iterator[None]:
        """Keeps what is there of the keys, and what comes in, from making room for others.

        It lasts as long as the block: from before a request's segments are read until it has its
        lease, or is given up.
        """
        hold = Hold(frozenset(keys))
        with self._lock:
            for key in hold.keys:
                self._keep_for(hold, key)
            self._holds.add(hold)
        try:
            yield
        finally:
            with self._lock:
                self._holds.discard(hold)
                self._let_go(hold.entries)
                self._shed()

    def _keep_for(self, hold: Hold, key: str) -> None:
        if key in hold.keys and key in self._entries:
            self._policy.pin(self._entries[key])
            hold.entries.append(self._entries[key])

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
            entries = [self._entries[key] for key in keys]
            for entry in entries:
                self._policy.pin(entry)
            slot = self._free_slots.pop()
            self._held[slot] = entries
            generation = int(self._leases[slot, 0]) + 1
            self._leases[slot] = (generation, LEASE_NEW)
            runs = tuple(run for entry in entries for run in entry.runs)
            return Lease(slot, generation, runs, tuple(keys))

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
                self._shed()
                return
            self._ended[lease.slot] = (lease, time.monotonic())
            self._collect()

    def collect(self) -> None:
        """Frees what ended requests held; called now and then, so that a drain ends without one."""
        with self._lock:
            self._collect()

    def _collect(self) -> None:
        now = time.monotonic()
        for lease, since in list(self._ended.values()):
            state = self._leases[lease.slot, 1]
            unseen = state == LEASE_NEW and now - since > UNSEEN_LEASE_SECONDS
            if state == LEASE_DONE or unseen:
                del self._ended[lease.slot]
                self._release(lease)
        self._shed()

    def _release(self, lease: Lease) -> None:
        self._leases[lease.slot] = (lease.generation + 1, LEASE_FREE)
        self._free_slots.append(lease.slot)
        self._let_go(self._held.pop(lease.slot))

    def _let_go(self, entries: Sequence[Resident]) -> None:
        for entry in entries:
            self._policy.unpin(entry)
            if not entry.pins and self._entries.get(entry.key) is not entry:
                if entry.erased:
                    self._wipe(entry)
                self._drop(entry)  # discarded meanwhile

    def _shed(self) -> None:
        self._evict(self._policy.overflow())

    def _evict(self, victims: Sequence[Resident]) -> None:
        for entry in victims:
            del self._entries[entry.key]
            self._drop(entry)
            self.evictions += 1
            self.stats.evicted(entry.store)

    def _drop(self, entry: Resident) -> None:
        self._policy.remove(entry)
        self._free.give(entry.runs)
        for start, _ in entry.runs:
            self._stamps[start] = 0
