"""The DRAM arena: allocation, eviction and the life of a lease."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inferscale_runtime.tiers import arena as arena_module
from inferscale_runtime.tiers.arena import (
    Arena,
    ByteLimits,
    StoreUse,
)
from inferscale_runtime.tiers.leases import activate_lease, finish_lease
from inferscale_runtime.tiers.slab import (
    NUM_LEASES,
    SlabShape,
    create_run_files,
    map_leases,
    map_slab,
)

SHAPE = SlabShape(num_rows=10, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    create_run_files(tmp_path, SHAPE)
    return Arena(map_slab(tmp_path, SHAPE), map_leases(tmp_path))


def rows(count: int) -> torch.Tensor:
    return torch.ones((count, 1, 2, 1, 2))


def test_least_recently_used_makes_room(arena: Arena) -> None:
    for key in ("a", "b", "c"):
        assert arena.put(key, rows(3))
    lease = arena.acquire(["a"])
    assert lease is not None
    assert arena.put("d", rows(3))
    assert arena.resident(["a", "b", "c", "d"]) == {"a", "c", "d"}
    assert arena.evictions == 1


def test_pinned_segments_are_never_evicted(arena: Arena) -> None:
    assert arena.put("preamble", rows(4), pin=True)
    assert arena.put("a", rows(6))
    lease = arena.acquire(["preamble", "a"])
    assert lease is not None
    assert lease.runs == ((0, 4), (4, 6))
    assert not arena.put("b", rows(1))
    assert arena._leases[lease.slot, 0] == lease.generation
    assert activate_lease(arena._leases, lease.slot, lease.generation)
    arena.end(lease, submitted=True)
    assert arena.pinned_rows == 10, "the engine still uses it"
    finish_lease(arena._leases, lease.slot, lease.generation)
    assert arena.put("b", rows(1))
    assert arena.resident(["preamble", "a", "b"]) == {"preamble", "b"}


def test_refused_request_frees_at_once_and_a_late_one_is_not_served(arena: Arena) -> None:
    arena.put("a", rows(2))
    lease = arena.acquire(["a"])
    assert lease is not None
    arena.end(lease, submitted=False)
    assert arena.pinned_rows == 0
    assert not activate_lease(arena._leases, lease.slot, lease.generation)


def test_unseen_lease_expires(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    arena.put("a", rows(2))
    lease = arena.acquire(["a"])
    assert lease is not None
    arena.end(lease, submitted=True)
    now = arena_module.time.monotonic() + arena_module.UNSEEN_LEASE_SECONDS + 1
    monkeypatch.setattr(arena_module.time, "monotonic", lambda: now)
    arena.put("b", rows(1))
    assert arena.pinned_rows == 0
    assert not activate_lease(arena._leases, lease.slot, lease.generation)


def test_missing_segment_gives_no_lease(arena: Arena) -> None:
    arena.put("a", rows(2))
    assert arena.acquire(["a", "b"]) is None
    assert arena.pinned_rows == 0


def test_files_are_closed_to_others(tmp_path: Path) -> None:
    create_run_files(tmp_path, SHAPE)
    for name in ("slab", "leases", "secret"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0, name


def test_freed_neighbours_merge(arena: Arena) -> None:
    for key in ("a", "b", "c"):
        assert arena.put(key, rows(3))
    assert arena.put("whole", rows(10))
    assert arena.resident(["a", "b", "c", "whole"]) == {"whole"}
    assert arena.evictions == 3


def test_too_large_evicts_nothing(arena: Arena) -> None:
    assert arena.put("a", rows(3))
    assert not arena.put("b", rows(11))
    assert arena.resident(["a"]) == {"a"}
    assert arena.evictions == 0


def test_use_makes_recent(arena: Arena) -> None:
    for key in ("a", "b"):
        assert arena.put(key, rows(5))
    lease = arena.acquire(["a"])
    assert lease is not None
    arena.end(lease, submitted=False)
    assert arena.put("c", rows(5))
    assert arena.resident(["a", "b"]) == {"a"}


def test_what_a_request_found_is_not_pushed_out_by_what_it_reads(arena: Arena) -> None:
    for key in ("a", "b"):
        assert arena.put(key, rows(5))
    assert arena.look_up(["a", "c"]) == {"a"}
    assert arena.put("c", rows(5))
    assert arena.acquire(["a", "c"]) is not None


def test_late_finish_ends_nothing(arena: Arena) -> None:
    arena.put("a", rows(2))
    old = arena.acquire(["a"])
    assert old is not None
    arena.end(old, submitted=False)
    new = arena.acquire(["a"])
    assert new is not None
    assert new.slot == old.slot
    finish_lease(arena._leases, old.slot, old.generation)
    assert activate_lease(arena._leases, new.slot, new.generation)


def test_engine_may_finish_first(arena: Arena) -> None:
    arena.put("a", rows(2))
    lease = arena.acquire(["a"])
    assert lease is not None
    assert activate_lease(arena._leases, lease.slot, lease.generation)
    assert activate_lease(arena._leases, lease.slot, lease.generation), "again, after preemption"
    finish_lease(arena._leases, lease.slot, lease.generation)
    assert not activate_lease(arena._leases, lease.slot, lease.generation)
    assert arena.put("b", rows(1))
    assert arena.pinned_rows == 2, "the other side has not ended it"
    arena.end(lease, submitted=True)
    assert arena.pinned_rows == 0


@pytest.mark.parametrize("again", [True, False])
def test_ending_twice_frees_once(arena: Arena, again: bool) -> None:
    arena.put("a", rows(2))
    arena.put("b", rows(2))
    first = arena.acquire(["a"])
    assert first is not None
    arena.end(first, submitted=False)
    second = arena.acquire(["b"])
    assert second is not None
    assert second.slot == first.slot
    arena.end(first, submitted=again)
    assert arena.pinned_rows == 2
    third = arena.acquire(["a"])
    assert third is not None
    assert third.slot != second.slot


@pytest.mark.parametrize("slot", [-1, NUM_LEASES])
def test_slots_outside_are_refused(arena: Arena, slot: int) -> None:
    assert not activate_lease(arena._leases, slot, 0)


def test_a_segment_in_pieces_comes_back_in_order(arena: Arena) -> None:
    for key in ("a", "b", "c", "d", "e"):
        assert arena.put(key, rows(2))
    held = arena.acquire(["b", "d"])
    assert held is not None
    content = torch.arange(5.0).view(5, 1, 1, 1, 1).expand(5, 1, 2, 1, 2)
    assert arena.put("long", content), "six rows are free, two in a row"
    lease = arena.acquire(["d", "long"])
    assert lease is not None
    order = [row for start, count in lease.runs for row in range(start, start + count)]
    assert len(lease.runs) > 2
    assert arena._slab[order[2:], 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_discarded_segments_are_gone_for_new_requests_and_kept_for_running_ones(
    arena: Arena,
) -> None:
    arena.put("a", rows(3))
    arena.put("b", rows(3))
    lease = arena.acquire(["a", "a"])
    assert lease is not None
    assert arena.discard(["a", "b", "unknown"]) == 2
    assert arena.resident(["a", "b"]) == set()
    assert arena.used_rows == 3
    assert arena.put("a", rows(3) * 2), "the same fact again, beside the old bytes"
    assert bool((arena._slab[lease.runs[0][0]] == 1).all())
    arena.end(lease, submitted=False)
    assert arena.used_rows == 3
    assert arena.resident(["a"]) == {"a"}


def test_a_preamble_that_is_discarded_leaves_no_rows(arena: Arena) -> None:
    arena.put("preamble", rows(4), pin=True)
    arena.put("preamble", rows(4), pin=True)
    assert arena.pinned_rows == 4
    assert arena.discard(["preamble"]) == 1
    assert arena.used_rows == 0


def test_discarded_rows_are_wiped_at_once_or_when_their_requests_end(arena: Arena) -> None:
    arena.put("a", rows(3))
    arena.put("b", rows(3))
    lease = arena.acquire(["a"])
    assert lease is not None
    arena.discard(["a", "b"])
    assert int((arena._slab != 0).flatten(1).any(dim=1).sum()) == 3, "only what the request reads"
    arena.end(lease, submitted=False)
    assert not bool(arena._slab.any())


class Gate(torch.Tensor):
    """A source whose copy waits until it is told to go on."""

    @staticmethod
    def __new__(cls) -> Gate:
        gate = torch.ones((3, 1, 2, 1, 2)).as_subclass(cls)
        gate.reached, gate.go = threading.Event(), threading.Event()
        return gate

    reached: threading.Event
    go: threading.Event

    def __getitem__(self, index: Any) -> Any:
        self.reached.set()
        assert self.go.wait(60)
        return super().__getitem__(index)


@pytest.fixture
def copying(arena: Arena) -> Iterator[tuple[Gate, list[bool], threading.Thread]]:
    gate, results = Gate(), []
    thread = threading.Thread(target=lambda: results.append(arena.put("slow", gate, store="s")))
    thread.start()
    assert gate.reached.wait(60)
    yield gate, results, thread
    gate.go.set()
    thread.join(60)


def test_requests_go_on_while_a_segment_is_copied(
    arena: Arena, copying: tuple[Gate, list[bool], threading.Thread]
) -> None:
    gate, results, thread = copying
    assert arena.resident(["slow"]) == set(), "not before its bytes are there"
    assert arena.acquire(["slow"]) is None
    assert arena.put("other", rows(7))
    assert not arena.put("more", rows(8)), "the rows being written are taken"
    gate.go.set()
    thread.join(60)
    assert results == [True]
    assert arena.acquire(["slow", "other"]) is not None


def test_a_segment_discarded_while_it_is_copied_never_shows(
    arena: Arena, copying: tuple[Gate, list[bool], threading.Thread]
) -> None:
    gate, results, thread = copying
    arena.discard(["slow"])
    gate.go.set()
    thread.join(60)
    assert results == [False]
    assert arena.resident(["slow"]) == set()
    assert arena.used_rows == 0
    assert arena.put("slow", rows(3)), "and may come again"


def test_a_budget_that_shrinks_during_a_copy_holds(
    arena: Arena, copying: tuple[Gate, list[bool], threading.Thread]
) -> None:
    gate, _, thread = copying
    arena.set_limits(2 * arena.row_bytes, {})
    assert arena.used_rows == 3
    gate.go.set()
    thread.join(60)
    assert arena.used_rows == 0


def test_a_failed_copy_leaves_nothing(arena: Arena) -> None:
    with pytest.raises(RuntimeError):
        arena.put("a", torch.ones((3, 1, 2, 1, 5)))
    assert arena.used_rows == 0
    assert arena.put("a", rows(3))


def test_shrinking_drains_what_requests_hold(arena: Arena) -> None:
    for key in ("a", "b"):
        arena.put(key, rows(5))
    lease = arena.acquire(["a"])
    assert lease is not None
    assert activate_lease(arena._leases, lease.slot, lease.generation)
    arena.set_limits(3 * arena.row_bytes, {})
    assert arena.resident(["a", "b"]) == {"a"}
    assert not arena.put("c", rows(1))
    assert activate_lease(arena._leases, lease.slot, lease.generation), "the request goes on"
    arena.end(lease, submitted=True)
    finish_lease(arena._leases, lease.slot, lease.generation)
    arena.collect()
    assert arena.used_rows == 0
    assert arena.put("c", rows(3))
    arena.set_limits(None, {})
    assert arena.put("d", rows(7))


def test_figures_by_store(arena: Arena) -> None:
    size = arena.row_bytes
    arena.set_limits(None, {"x": ByteLimits(2 * size, 4 * size + 1, "gpu")})
    arena.put("a", rows(3), store="x")
    arena.put("b", rows(2), store="y")
    lease = arena.acquire(["b"])
    assert lease is not None
    assert arena.use_by_store() == {
        "x": StoreUse(3 * size, 0, 1, 2 * size, 4 * size, "gpu"),
        "y": StoreUse(2 * size, 2 * size, 1, 0, None, "dram"),
    }
    assert arena.look_up(["a", "c", "c"], store="x") == {"a"}
    assert arena.put("c", rows(4), store="x")
    figures = arena.stats.snapshot()["x"]
    assert (figures.hits, figures.misses, figures.evictions) == (1, 1, 1)
    assert arena.slab_bytes == arena.budget_bytes == 10 * size
