"""The DRAM arena: allocation, eviction and the life of a lease."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inferscale_runtime.tiers import arena as arena_module
from inferscale_runtime.tiers.arena import Arena, activate_lease, finish_lease
from inferscale_runtime.tiers.slab import SlabShape, create_run_files, map_leases, map_slab

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


def test_files_are_private(tmp_path: Path) -> None:
    create_run_files(tmp_path, SHAPE)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
