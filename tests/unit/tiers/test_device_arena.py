"""The GPU arena, on whatever device there is: right bytes, budget, admission, forgetting."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.device_arena import AGE_AFTER, DeviceArena, UseCounts, pin_slab
from inferscale_runtime.tiers.leases import Lease
from inferscale_runtime.tiers.slab import NUM_LEASES

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
ROWS, LAYERS, HEADS, DIM = 32, 2, 4, 3


class Pair:
    """A DRAM arena and one rank's device arena over it."""

    def __init__(self, device: str, device_rows: int, heads: slice = slice(0, HEADS)) -> None:
        self.slab = torch.zeros((ROWS, LAYERS, 2, HEADS, DIM))
        stamps = np.zeros(ROWS, np.int64)
        leases = np.zeros((NUM_LEASES, 2), np.int64)
        self.dram = Arena(self.slab, leases, stamps=stamps)
        self.heads = heads
        row = LAYERS * 2 * (heads.stop - heads.start) * DIM * 4
        self.device = DeviceArena(
            self.slab, stamps, heads, device_rows * row + row // 2, torch.device(device)
        )
        self.stamp = 0

    def put(self, key: str, rows: int) -> bool:
        self.stamp += 1
        values = torch.arange(rows * LAYERS * 2 * HEADS * DIM, dtype=torch.float32)
        kv = values.view(rows, LAYERS, 2, HEADS, DIM) + self.stamp * 1000
        return self.dram.put(key, kv)

    def lease(self, *keys: str) -> Lease:
        lease = self.dram.acquire(keys)
        assert lease is not None
        return lease

    def expected(self, lease: Lease) -> torch.Tensor:
        rows = torch.cat([self.slab[start : start + n] for start, n in lease.runs])
        return rows[:, :, :, self.heads]

    def fetch(self, *keys: str) -> None:
        """One whole request; its bytes must be those of the DRAM arena."""
        lease = self.lease(*keys)
        assert torch.equal(self.device.fetch(lease.runs).cpu(), self.expected(lease))
        self.dram.end(lease, submitted=False)

    def counts(self) -> tuple[int, int]:
        figures = self.device.figures
        return figures.hits, figures.misses


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest) -> Callable[..., Pair]:
    return lambda *arguments: Pair(request.param, *arguments)


def test_the_second_read_comes_from_the_device(make: Callable[..., Pair]) -> None:
    pair = make(16)
    pair.put("a", 5)
    pair.put("b", 4)
    pair.fetch("a", "b")
    assert pair.counts() == (0, 2)
    pair.fetch("b", "a")
    pair.put("c", 3)
    pair.fetch("c", "a", "a", "b")
    assert pair.counts() == (5, 3)
    figures = pair.device.figures
    assert figures.copied_bytes == 12 * pair.device.row_bytes
    assert figures.used_bytes == 12 * pair.device.row_bytes
    assert figures.allocated_bytes == 16 * pair.device.row_bytes


@pytest.mark.parametrize("heads", [slice(0, 2), slice(2, 4), slice(1, 2)])
def test_a_rank_copies_its_own_heads(make: Callable[..., Pair], heads: slice) -> None:
    pair = make(16, heads)
    pair.put("a", 5)
    pair.fetch("a")
    pair.fetch("a")
    assert pair.counts() == (1, 1)
    assert pair.device.row_bytes == LAYERS * 2 * (heads.stop - heads.start) * DIM * 4


def test_a_segment_in_pieces_is_read_in_order(make: Callable[..., Pair]) -> None:
    pair = make(32)
    for key in "abcdefgh":
        pair.put(key, 4)
    pair.dram.discard(["b", "d", "f"])
    pair.put("long", 12)
    lease = pair.lease("long")
    assert len(lease.runs) == 3
    pair.fetch("a", "long", "c")
    pair.fetch("long")
    assert pair.counts() == (3, 5)


def test_rows_written_again_are_never_taken_for_the_old_ones(make: Callable[..., Pair]) -> None:
    pair = make(16)
    pair.put("a", 5)
    pair.fetch("a")
    pair.dram.discard(["a"])
    pair.put("b", 5)
    assert pair.lease("b").runs == ((0, 5),), "the rows of a"
    pair.fetch("b")
    assert pair.counts() == (0, 2)


def test_sweep_forgets_and_blanks_what_was_freed(make: Callable[..., Pair]) -> None:
    pair = make(16)
    pair.put("a", 5)
    pair.put("b", 5)
    pair.fetch("a", "b")
    assert pair.device.sweep() == 0
    pair.dram.discard(["a"])
    assert pair.device.sweep() == 1
    assert pair.device.figures.used_bytes == 5 * pair.device.row_bytes
    assert int((pair.device._store[:5] != 0).sum()) == 0
    pair.fetch("b")
    assert pair.counts() == (1, 2)


def test_what_is_used_once_does_not_push_out_what_is_used_often(make: Callable[..., Pair]) -> None:
    pair = make(8)
    for key in "abcdef":
        pair.put(key, 4)
    for _ in range(3):
        pair.fetch("a", "b")
    for key in "cdef":
        pair.fetch(key)
    before = pair.counts()
    pair.fetch("a", "b")
    assert pair.counts() == (before[0] + 2, before[1])
    for _ in range(5):
        pair.fetch("c")
    before = pair.counts()
    pair.fetch("c")
    assert pair.counts() == (before[0] + 1, before[1]), "until it is used more often"
    assert pair.device.figures.evictions == 1


def test_one_request_larger_than_the_arena_is_served(make: Callable[..., Pair]) -> None:
    pair = make(8)
    for key in "abcdef":
        pair.put(key, 5)
    pair.fetch(*"abcdef")
    assert pair.device.figures.used_bytes <= 8 * pair.device.row_bytes
    pair.fetch(*"fedcba")


def test_no_budget_keeps_nothing(make: Callable[..., Pair]) -> None:
    pair = make(0)
    pair.put("a", 5)
    pair.fetch("a")
    pair.fetch("a")
    assert pair.counts() == (0, 2)
    assert pair.device.figures.allocated_bytes == 0


def test_an_empty_request_reads_nothing(make: Callable[..., Pair]) -> None:
    assert make(8).device.fetch([]).shape[0] == 0


def test_the_budget_changes_live(make: Callable[..., Pair]) -> None:
    pair = make(16)
    for key in "abc":
        pair.put(key, 5)
    pair.fetch(*"abc")
    size = pair.device.row_bytes
    pair.device.set_budget(6 * size + 1)
    assert pair.device.figures.used_bytes == 5 * size
    pair.fetch(*"abc")
    assert pair.counts() == (1, 5), "the one that was used last is still there"
    pair.device.set_budget(None)
    assert pair.device.figures.budget_bytes == 16 * size
    pair.fetch(*"abc")
    assert pair.device.figures.used_bytes == 15 * size


def test_a_store_made_in_a_forward_is_blanked_by_another_thread(make: Callable[..., Pair]) -> None:
    with torch.inference_mode():  # as vLLM runs forwards; other threads do not run in it
        pair = make(16)
        pair.put("a", 5)
        pair.fetch("a")
    pair.device.set_budget(0)
    assert pair.device.figures.used_bytes == 0


def test_counts_age() -> None:
    counts = UseCounts()
    for _ in range(20):
        counts.add(7)
    assert counts.of(7) == 15
    for stamp in range(AGE_AFTER):
        counts.add(100 + stamp)
    assert 0 < counts.of(7) < 15


def test_pinning_without_cuda_is_refused_and_harmless() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert pin_slab(torch.zeros(4)) is False


class DeviceRules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair("cpu", 10)
        self.open: list[Lease] = []
        self.budget = 10

    @rule(key=st.integers(0, 7).map(str), rows=st.integers(1, 6))
    def put(self, key: str, rows: int) -> None:
        self.pair.put(key, rows)

    @rule(key=st.integers(0, 7).map(str))
    def discard(self, key: str) -> None:
        self.pair.dram.discard([key])

    @rule(keys=st.lists(st.integers(0, 7).map(str), min_size=1, max_size=4))
    def request(self, keys: list[str]) -> None:
        lease = self.pair.dram.acquire(keys)
        if lease is not None:
            self.open.append(lease)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 20))
    def fetch(self, which: int) -> None:
        lease = self.open[which % len(self.open)]
        got = self.pair.device.fetch(lease.runs)
        assert torch.equal(got, self.pair.expected(lease))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 20))
    def end(self, which: int) -> None:
        self.pair.dram.end(self.open.pop(which % len(self.open)), submitted=False)

    @rule()
    def sweep(self) -> None:
        self.pair.device.sweep()
        stamps = self.pair.device._stamps
        assert all(stamps[c.source] == s for s, c in self.pair.device._copies.items())

    @rule(budget=st.none() | st.integers(0, 12))
    def limit(self, budget: int | None) -> None:
        self.budget = 10 if budget is None else min(10, budget)
        size = self.pair.device.row_bytes
        self.pair.device.set_budget(None if budget is None else budget * size)

    @invariant()
    def rows_add_up(self) -> None:
        device = self.pair.device
        copies = device._copies.values()
        runs = sorted([*(run for copy in copies for run in copy.runs), *device._free])
        rows = [row for start, n in runs for row in range(start, start + n)]
        assert rows == list(range(10))
        assert device.figures.used_bytes == sum(c.rows for c in copies) * device.row_bytes
        assert device.figures.used_bytes <= self.budget * device.row_bytes


TestDeviceRules = DeviceRules.TestCase
TestDeviceRules.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_admission_beats_plain_lru_on_a_trace_with_scans() -> None:
    # Zipf-distributed users with every fifth request from a user who never comes back.
    rng = np.random.default_rng(3)
    weights = 1 / np.arange(1, 41)
    draws = rng.choice(40, size=3000, p=weights / weights.sum())
    trace = [int(d) if n % 5 else 1000 + n for n, d in enumerate(draws)]
    capacity = 10
    lru: OrderedDict[int, None] = OrderedDict()
    lru_hits = 0
    for key in trace:
        lru_hits += key in lru
        lru[key] = None
        lru.move_to_end(key)
        if len(lru) > capacity:
            lru.popitem(last=False)
    slab = torch.zeros((4096, 1, 2, 1, 1))
    stamps = np.arange(1, 4097)
    arena = DeviceArena(slab, stamps, slice(0, 1), capacity * 8, torch.device("cpu"))
    for key in trace:
        arena.fetch([(key, 1)])
    assert arena.figures.hits + arena.figures.misses == 3000
    assert arena.figures.hits > lru_hits
