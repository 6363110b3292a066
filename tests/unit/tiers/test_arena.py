"""The DRAM arena: allocation, eviction and the life of a lease."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_runtime.tiers import arena as arena_module
from inferscale_runtime.tiers.arena import Arena, Lease, activate_lease, finish_lease
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


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 7), st.integers(1, 6)),
        st.tuples(st.just("acquire"), st.integers(0, 7), st.integers(0, 7)),
        st.tuples(st.just("activate"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("finish"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 3), st.integers(0, 1)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS)
def test_rows_are_never_lost_or_shared(actions: list[tuple[str, int, int]]) -> None:
    total = SHAPE.num_rows
    slab = torch.zeros(SHAPE.tensor_shape)
    leases = np.zeros((NUM_LEASES, 2), np.int64)
    arena = Arena(slab, leases)
    written: dict[str, int] = {}
    open_leases: list[Lease] = []
    for stamp, (action, first, second) in enumerate(actions, start=1):
        lease = open_leases[first] if first < len(open_leases) else None
        if action == "put":
            known = arena.resident([str(first)])
            if arena.put(str(first), rows(second) * stamp) and not known:
                written[str(first)] = stamp
        elif action == "acquire":
            found = arena.acquire([str(first), str(second)])
            open_leases += [found] if found else []
        elif lease and action == "activate":
            activate_lease(leases, lease.slot, lease.generation)
        elif lease and action == "finish":
            finish_lease(leases, lease.slot, lease.generation)
        elif lease and action == "end":
            arena.end(lease, submitted=bool(second))
            open_leases.remove(lease)
        held = sorted((entry.start, entry.rows) for entry in arena._entries.values())
        spans = sorted([*held, *arena._free])
        assert sum(size for _, size in spans) == total
        assert [start for start, _ in spans] == [
            sum(size for _, size in spans[:n]) for n in range(len(spans))
        ]
        assert all(entry.pins >= 0 for entry in arena._entries.values())
        for key, entry in arena._entries.items():
            content = slab[entry.start : entry.start + entry.rows]
            assert bool((content == written[key]).all())
        for kept in open_leases:  # what a request holds does not move
            places = [(arena._entries[k].start, arena._entries[k].rows) for k in kept.keys]
            assert tuple(places) == kept.runs
        assert len(set(arena._free_slots)) == len(arena._free_slots)
