"""The plan file: followed by content, applied live, and never worse than the last good one."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from inferscale_runtime.nvml import NvmlSampler
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.leases import finish_lease
from inferscale_runtime.tiers.plan_file import MAX_PLAN_BYTES, PlanFollower, read_plan
from inferscale_runtime.tiers.report import TierReport
from inferscale_runtime.tiers.slab import NUM_LEASES

ROW = 2 * 4


@pytest.fixture
def arena() -> Arena:
    return Arena(torch.zeros((100, 1, 2, 1, 1)), np.zeros((NUM_LEASES, 2), np.int64))


def rows(count: int) -> torch.Tensor:
    return torch.ones((count, 1, 2, 1, 1))


def plan(**fields: Any) -> str:
    return json.dumps(fields)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_plan_is_applied_and_changes_are_followed(arena: Arena, tmp_path: Path) -> None:
    path, clock = tmp_path / "plan.json", Clock()
    share = {"floor_bytes": 2 * ROW, "ceiling_bytes": 30 * ROW, "tier": "gpu"}
    path.write_text(plan(version=1, dram_bytes=40 * ROW, stores={"a": share}))
    follower = PlanFollower(str(path), arena, clock)
    follower.poll()
    assert arena.budget_bytes == 40 * ROW
    use = arena.use_by_store()["a"]
    assert (use.floor_bytes, use.ceiling_bytes, use.tier) == (2 * ROW, 30 * ROW, "gpu")
    assert (follower.state.applied_at, follower.state.reason) == (50, None)
    clock.now = 60
    follower.poll()
    assert follower.state.applied_at == 50, "unchanged content is not applied again"
    path.write_text(plan(dram_bytes=20 * ROW))
    follower.poll()
    assert arena.budget_bytes == 20 * ROW
    assert follower.state.applied_at == 60
    assert arena.use_by_store() == {}


def test_the_links_of_a_mounted_config_map_are_followed(arena: Arena, tmp_path: Path) -> None:
    for name, size in (("..1", 10), ("..2", 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(plan(dram_bytes=size * ROW))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "plan.json").symlink_to("..data/plan.json")
    follower = PlanFollower(str(tmp_path / "plan.json"), arena)
    follower.poll()
    assert arena.budget_bytes == 10 * ROW
    (tmp_path / "..new").symlink_to("..2")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    follower.poll()
    assert arena.budget_bytes == 20 * ROW


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "document"),
        ('{"dram_bytes": 8', "document"),
        ("[]", "document"),
        ('{"version": 2}', "field 'version'"),
        ('{"dram_bytes": -1}', "field 'dram_bytes'"),
        ('{"dram_bytes": "much"}', "field 'dram_bytes'"),
        ('{"stores": {"a": {"tier": "tape"}}}', "field 'stores.a.tier'"),
        ('{"stores": {"a": {"floor_bytes": 9, "ceiling_bytes": 8}}}', "9 is above ceiling_bytes 8"),
        ('{"dram_bytes": 8, "stores": {"a": {"floor_bytes": 9}}}', "sum of the floors, 9"),
        ('{"colour": 1}', "field 'colour'"),
        (" " * (MAX_PLAN_BYTES + 1), "larger than"),
    ],
)
def test_a_broken_plan_keeps_the_last_one(
    arena: Arena, tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan(dram_bytes=40 * ROW))
    follower = PlanFollower(str(path), arena, Clock())
    follower.poll()
    path.write_text(text)
    follower.poll()
    assert arena.budget_bytes == 40 * ROW
    assert follower.state.reason is not None
    assert reason in follower.state.reason
    assert "\n" not in follower.state.reason
    path.write_text(plan(dram_bytes=30 * ROW))
    follower.poll()
    assert arena.budget_bytes == 30 * ROW
    assert follower.state.reason is None


def test_a_missing_file_is_a_state_until_it_comes(arena: Arena, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    follower = PlanFollower(str(path), arena, Clock())
    follower.poll()
    assert follower.state.reason == "No such file or directory"
    path.write_text(plan(dram_bytes=40 * ROW))
    follower.poll()
    assert (follower.state.reason, arena.budget_bytes) == (None, 40 * ROW)
    path.unlink()
    follower.poll()
    assert follower.state.reason == "No such file or directory"
    assert arena.budget_bytes == 40 * ROW
    path.write_text(plan(dram_bytes=40 * ROW))
    follower.poll()
    assert follower.state.reason is None, "the same plan came back"


def test_a_request_in_flight_is_not_interrupted(arena: Arena, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    arena.put("a", rows(30), store="a")
    arena.put("b", rows(30), store="a")
    lease = arena.acquire(["a"])
    assert lease is not None
    path.write_text(plan(dram_bytes=10 * ROW))
    follower = PlanFollower(str(path), arena, Clock())
    follower.poll()
    assert arena.used_rows == arena.pinned_rows == 30
    ((start, count),) = lease.runs
    assert bool((arena._slab[start : start + count] == 1).all())
    arena.end(lease, submitted=True)
    finish_lease(arena._leases, lease.slot, lease.generation)
    follower.poll()
    assert arena.used_rows == 0, "drained by the next look at the file"


def test_the_thread_follows_and_stops(arena: Arena, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan(dram_bytes=40 * ROW))
    applied = threading.Event()

    def clock() -> float:
        applied.set()
        return 1.0

    follower = PlanFollower(str(path), arena, clock)
    follower.start(seconds=0.001)
    assert applied.wait(30)
    applied.clear()
    path.write_text(plan(dram_bytes=30 * ROW))
    assert applied.wait(30)
    follower.stop()
    assert arena.budget_bytes == 30 * ROW
    assert follower._thread is not None
    assert not follower._thread.is_alive()


def test_plans_default_to_no_limits() -> None:
    empty = read_plan(b"{}")
    assert (empty.dram_bytes, empty.gpu_bytes, empty.stores) == (None, None, {})


def test_report_has_every_figure(arena: Arena, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan(dram_bytes=40 * ROW, stores={"b": {"floor_bytes": 5 * ROW}}))
    follower = PlanFollower(str(path), arena, Clock())
    follower.poll()
    report = TierReport(arena, follower, NvmlSampler(Clock()))
    arena.put("preamble", rows(3), pin=True)
    arena.put("k", rows(4), store="a")
    arena.look_up(["k", "l"], store="a")
    arena.stats.staged("a", 1, 4 * ROW, 0.5)
    status = json.loads(json.dumps(report.status()))
    assert status["tiers"]["dram"] == {
        "slab_bytes": 100 * ROW,
        "budget_bytes": 40 * ROW,
        "used_bytes": 7 * ROW,
        "pinned_bytes": 3 * ROW,
        "evictions": 0,
    }
    assert status["tiers"]["plan"] == {"file": str(path), "applied_at": 50, "reason": None}
    assert set(status["tiers"]["stores"]) == {"", "a", "b"}
    a = status["tiers"]["stores"]["a"]
    assert (a["used_bytes"], a["hits"], a["misses"]) == (4 * ROW, 1, 1)
    assert (a["staged_segments"], a["staged_bytes"], a["staging_seconds"]) == (1, 4 * ROW, 0.5)
    assert a["heat"] > 0
    assert status["tiers"]["stores"]["b"]["floor_bytes"] == 5 * ROW
    assert status["gpu"]["up"] is False
    registry = CollectorRegistry()
    registry.register(report)
    labels = {"store": "a"}
    assert registry.get_sample_value("inferscale_store_hits_total", labels) == 1
    assert registry.get_sample_value("inferscale_store_staging_seconds_total", labels) == 0.5
    assert registry.get_sample_value("inferscale_store_arena_used_bytes", labels) == 4 * ROW
    assert registry.get_sample_value("inferscale_tier_plan_valid") == 1
    path.write_text("{")
    follower.poll()
    assert registry.get_sample_value("inferscale_tier_plan_valid") == 0
    assert registry.get_sample_value("inferscale_tier_plan_applied_timestamp_seconds") == 50
