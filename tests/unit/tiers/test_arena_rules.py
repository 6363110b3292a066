"""Whatever the order of events: no row is lost, shared or moved, and the limits hold."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.arena_use import ByteLimits
from inferscale_runtime.tiers.eviction import Resident
from inferscale_runtime.tiers.leases import Lease, activate_lease, finish_lease
from inferscale_runtime.tiers.slab import NUM_LEASES, SlabShape

SHAPE = SlabShape(num_rows=12, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")
ROW = SHAPE.row_bytes
STORES = ("", "x", "y")
KEYS = st.integers(0, 8).map(str)


def store_of(key: str) -> str:
    return STORES[int(key) % 3]


class ArenaRules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slab = torch.zeros(SHAPE.tensor_shape)
        self.leases = np.zeros((NUM_LEASES, 2), np.int64)
        self.arena = Arena(self.slab, self.leases)
        self.stamp = 0
        self.written: dict[str, int] = {}
        self.open: list[tuple[Lease, list[int]]] = []
        self.gone: list[Lease] = []
        self.holds: list[tuple[AbstractContextManager[None], set[str], set[str]]] = []
        self.budget = SHAPE.num_rows
        self.floor = 0
        self.ceiling: int | None = None

    def content(self, runs: tuple[tuple[int, int], ...]) -> list[int]:
        return [
            int(self.slab[row, 0, 0, 0, 0]) for start, n in runs for row in range(start, start + n)
        ]

    @rule(key=KEYS, count=st.integers(1, 6))
    def put(self, key: str, count: int) -> None:
        self.stamp += 1
        before = self.rows_by_store()
        known = self.arena.resident([key])
        kv = torch.full((count, 1, 2, 1, 2), float(self.stamp))
        if self.arena.put(key, kv, store=store_of(key)) and not known:
            self.written[key] = self.stamp
            for _, wanted, kept in self.holds:
                kept |= wanted & {key}
            assert self.arena.used_rows <= self.budget, "nothing comes in above the budget"
        if store_of(key) != "x" and before["x"] >= self.floor:
            assert self.rows_by_store()["x"] >= self.floor, "taken for another store"

    @rule(first=KEYS, second=KEYS)
    def acquire(self, first: str, second: str) -> None:
        lease = self.arena.acquire([first, second])
        resident = self.arena.resident([first, second]) == {first, second}
        assert (lease is not None) == resident
        if lease is not None:
            self.open.append((lease, self.content(lease.runs)))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 50), activate=st.booleans())
    def engine(self, which: int, activate: bool) -> None:
        lease, _ = self.open[which % len(self.open)]
        act = activate_lease if activate else finish_lease
        act(self.leases, lease.slot, lease.generation)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 50), submitted=st.booleans())
    def end(self, which: int, submitted: bool) -> None:
        lease, _ = self.open.pop(which % len(self.open))
        self.arena.end(lease, submitted=submitted)
        self.gone.append(lease)

    @rule(wanted=st.sets(KEYS, max_size=3))
    def hold(self, wanted: set[str]) -> None:
        kept = self.arena.resident([*wanted])
        block = self.arena.holding([*wanted])
        block.__enter__()
        self.holds.append((block, wanted, kept))

    @precondition(lambda self: self.holds)
    @rule(which=st.integers(0, 50))
    def let_go(self, which: int) -> None:
        block, _, _ = self.holds.pop(which % len(self.holds))
        block.__exit__(None, None, None)

    @rule(key=KEYS)
    def discard(self, key: str) -> None:
        for _, _, kept in self.holds:
            kept.discard(key)
        self.arena.discard([key])
        assert self.arena.resident([key]) == set()

    @rule(
        budget=st.integers(0, 14),
        floor=st.integers(0, 5),
        ceiling=st.none() | st.integers(5, 8),
    )
    def limit(self, budget: int, floor: int, ceiling: int | None) -> None:
        self.budget, self.ceiling = min(budget, SHAPE.num_rows), ceiling
        self.floor = min(floor, self.budget)
        most = None if ceiling is None else ceiling * ROW
        limits = {"x": ByteLimits(self.floor * ROW, most), "y": ByteLimits(tier="disk")}
        self.arena.set_limits(budget * ROW, limits)

    def entries(self) -> list[Resident]:
        kept = [*self.arena._held.values(), *(hold.entries for hold in self.arena._holds)]
        held = {id(entry): entry for entries in kept for entry in entries}
        held |= {id(entry): entry for entry in self.arena._entries.values()}
        return [*held.values()]

    def rows_by_store(self) -> dict[str, int]:
        rows = dict.fromkeys(STORES, 0)
        for entry in self.entries():
            rows[entry.store] += entry.rows
        return rows

    @invariant()
    def rows_are_free_or_of_one_segment(self) -> None:
        entries = self.entries()
        spans = sorted([*(run for entry in entries for run in entry.runs), *self.arena._free])
        rows = [row for start, n in spans for row in range(start, start + n)]
        assert rows == list(range(SHAPE.num_rows))
        assert self.arena.used_rows == sum(entry.rows for entry in entries)
        assert self.arena.pinned_rows == sum(entry.rows for entry in entries if entry.pins)
        assert all(entry.pins >= 0 for entry in entries)

    @invariant()
    def unpinned_segments_stay_within_the_limits(self) -> None:
        assert self.arena.used_rows - self.arena.pinned_rows <= self.budget
        own = [entry for entry in self.entries() if entry.store == "x"]
        idle = sum(entry.rows for entry in own if not entry.pins)
        if self.ceiling is not None and sum(entry.rows for entry in own) > self.ceiling:
            assert idle == 0, "only what requests hold may be above the ceiling"
        if self.arena.used_rows > self.budget:
            others = [e for e in self.entries() if not e.pins and e.store != "x"]
            assert not others, "without a floor nothing idle stays above the budget"

    @invariant()
    def bytes_are_those_that_were_written(self) -> None:
        for key, entry in self.arena._entries.items():
            assert {*self.content(entry.runs)} == {self.written[key]}
        for lease, promised in self.open:
            assert self.content(lease.runs) == promised, "what a request holds stays in place"
        free = self.arena._free_slots
        assert len(set(free)) == len(free)

    @invariant()
    def what_a_hold_has_seen_stays(self) -> None:
        for _, _, kept in self.holds:
            assert self.arena.resident([*kept]) == kept

    def teardown(self) -> None:
        for block, _, _ in self.holds:
            block.__exit__(None, None, None)
        for lease, _ in self.open:
            self.arena.end(lease, submitted=True)
            self.gone.append(lease)
        for lease in self.gone:
            finish_lease(self.leases, lease.slot, lease.generation)
        self.arena.set_limits(0, {})
        assert self.arena.used_rows == 0, "nothing leaks"
        assert [*self.arena._free] == [(0, SHAPE.num_rows)]
        assert len(self.arena._free_slots) == NUM_LEASES


TestArenaRules = ArenaRules.TestCase
TestArenaRules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
