"""The operator reads what the runtime really reports, and survives what it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inferscale_operator.planner.pod_status import read_pod_status, total_heat
from inferscale_runtime.nvml import DeviceMemory, NvmlSample, NvmlSampler
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.plan_file import PlanFollower
from inferscale_runtime.tiers.report import TierReport
from inferscale_runtime.tiers.slab import NUM_LEASES


@pytest.fixture
def report(tmp_path: Path) -> TierReport:
    arena = Arena(torch.zeros((100, 1, 2, 1, 1)), np.zeros((NUM_LEASES, 2), np.int64))
    arena.put("preamble", torch.zeros((2, 1, 2, 1, 1)), pin=True)
    arena.put("k", torch.zeros((5, 1, 2, 1, 1)), store="a")
    arena.look_up(["k", "l"], store="a")
    sampler = NvmlSampler(lambda: 107.0)
    device = DeviceMemory("0", "GPU-0", "H1", 1000, 300, 700)
    sampler._last = NvmlSample(100.0, None, (device,))
    return TierReport(arena, PlanFollower("", arena), sampler)


def test_a_real_report_is_read(report: TierReport) -> None:
    status = read_pod_status("pod-0", json.loads(json.dumps(report.status())), 2.0)
    assert status.figures.name == "pod-0"
    assert status.figures.age_seconds == 9, "of the answer and of the sample in it"
    assert status.figures.dram_capacity_bytes == 800
    assert status.figures.gpu_free_bytes == (700,)
    assert status.used_bytes == {"a": 40}
    assert set(status.heat) == {"a"}
    assert status.heat["a"] > 0
    again = read_pod_status("pod-1", report.status(), 2.0)
    assert total_heat([status, again])["a"] == pytest.approx(2 * status.heat["a"], rel=1e-3)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"tiers": None, "gpu": []},
        {"tiers": {"dram": {"slab_bytes": "8"}, "stores": [1]}, "gpu": {"up": 1}},
        {"tiers": {"dram": {"slab_bytes": -1}}, "gpu": {"up": True, "devices": "x"}},
        {"tiers": {"dram": {"slab_bytes": True}}, "gpu": {"up": True, "devices": [{}, 1]}},
        {"gpu": {"up": False, "devices": [{"free_bytes": 5}]}},
    ],
)
def test_what_is_missing_or_wrong_is_not_known(document: dict[str, Any]) -> None:
    figures = read_pod_status("pod-0", document, 1.0).figures
    assert figures.dram_capacity_bytes is None
    assert figures.gpu_free_bytes == ()
    assert figures.gpu_arena_bytes == 0
    assert figures.age_seconds == 1


def test_wrong_heat_is_cold() -> None:
    stores = {"a": {"heat": "hot"}, "b": {"heat": -1}, "c": 5, "d": {"heat": 2}}
    status = read_pod_status("pod-0", {"tiers": {"stores": stores}}, 1.0)
    assert status.heat == {"a": 0, "b": 0, "d": 2}
