"""Upkeep of the GPU arena: plan, forgetting, figures for the status and the metrics."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from inferscale_runtime.nvml import NvmlSampler
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.device_arena import DeviceArena, DeviceFigures
from inferscale_runtime.tiers.device_tier import DeviceTier, read_device_figures
from inferscale_runtime.tiers.plan_file import PlanFollower
from inferscale_runtime.tiers.report import TierReport
from inferscale_runtime.tiers.slab import NUM_LEASES

ROWS, ROW_BYTES = 32, 2 * 2 * 4


class Bench:
    """A DRAM arena and the GPU arena of one rank, with its plan."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = folder / "plan.json"
        self.slab = torch.zeros((ROWS, 1, 2, 2, 2))
        stamps = np.zeros(ROWS, np.int64)
        leases = np.zeros((NUM_LEASES, 2), np.int64)
        self.dram = Arena(self.slab, leases, stamps=stamps)
        self.device = DeviceArena(
            self.slab, stamps, slice(0, 1), ROWS * ROW_BYTES, torch.device("cpu")
        )
        self.tier = DeviceTier(self.device, folder, 0, str(self.plan))

    def fetch(self, key: str) -> torch.Tensor:
        lease = self.dram.acquire([key])
        assert lease is not None
        rows = self.tier.fetch(lease.runs)
        self.dram.end(lease, submitted=False)
        return rows

    def put(self, key: str, rows: int) -> None:
        assert self.dram.put(key, torch.ones((rows, 1, 2, 2, 2)), store="s")

    def told(self) -> DeviceFigures:
        found = read_device_figures(self.folder)
        assert found is not None
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_figures_reach_the_other_process(bench: Bench) -> None:
    assert read_device_figures(bench.folder) is None
    bench.put("a", 5)
    assert bench.fetch("a").shape == (5, 1, 2, 1, 2)
    bench.fetch("a")
    bench.tier.keep()
    told = bench.told()
    assert (told.hits, told.misses) == (1, 1)
    assert (told.used_bytes, told.copied_bytes) == (5 * ROW_BYTES, 5 * ROW_BYTES)
    assert told.allocated_bytes == told.budget_bytes == ROWS * ROW_BYTES
    [file] = bench.folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_equal_figures_are_not_written_again(bench: Bench) -> None:
    bench.tier.keep()
    [file] = bench.folder.iterdir()
    file.unlink()
    bench.tier.keep()
    assert list(bench.folder.iterdir()) == []


def test_the_plan_is_followed_and_a_broken_one_changes_nothing(bench: Bench) -> None:
    bench.put("a", 5)
    bench.fetch("a")
    for text, budget, used in (
        ('{"gpu_bytes": 128}', 128, 80),
        ("{", 128, 80),
        ('{"gpu_bytes": -1}', 128, 80),
        ('{"gpu_bytes": 64}', 64, 0),
        ("{}", ROWS * ROW_BYTES, 0),
    ):
        bench.plan.write_text(text)
        bench.tier.keep()
        assert (bench.told().budget_bytes, bench.told().used_bytes) == (budget, used), text
    bench.plan.unlink()
    bench.tier.keep()
    assert bench.told().budget_bytes == ROWS * ROW_BYTES


def test_copies_of_freed_rows_are_forgotten_without_a_request(bench: Bench) -> None:
    bench.device._store.fill_(7)
    bench.put("a", 5)
    bench.fetch("a")
    assert (bench.device._store == 1).any()
    assert bench.dram.discard(["a"]) == 1
    bench.tier.keep()
    assert bench.told().used_bytes == 0
    assert not (bench.device._store == 1).any(), "the facts may have been erased"


def test_copies_that_a_smaller_budget_drops_are_overwritten_too(bench: Bench) -> None:
    bench.device._store.fill_(7)
    bench.put("a", 5)
    bench.fetch("a")
    bench.plan.write_text('{"gpu_bytes": 0}')
    bench.tier.keep()
    assert not (bench.device._store == 1).any()


def test_the_thread_keeps_up_until_it_is_stopped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    done, calls = threading.Event(), []
    keep = bench.tier.keep

    def counted() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise OSError("once")
        keep()
        done.set()

    monkeypatch.setattr(bench.tier, "keep", counted)
    bench.tier.start(seconds=0.01)
    assert done.wait(20), "a failed round must not be the last one"
    bench.tier.stop()
    before = len(calls)
    assert bench.tier._thread is not None
    assert not bench.tier._thread.is_alive()
    assert len(calls) == before


def test_the_largest_of_all_ranks_is_told(tmp_path: Path) -> None:
    names = DeviceFigures.__dataclass_fields__
    for rank, value in enumerate((3, 5)):
        document = dict.fromkeys(names, value) | {"hits": 10 - value}
        (tmp_path / f"device-{rank}.json").write_text(json.dumps(document))
    (tmp_path / "device-2.json").write_text("{")
    (tmp_path / "device-3.json").write_text('{"hits": 1}')
    found = read_device_figures(tmp_path)
    assert found is not None
    assert (found.used_bytes, found.hits) == (5, 7)


def report(bench: Bench, run_dir: Path | None) -> TierReport:
    return TierReport(bench.dram, PlanFollower("", bench.dram), NvmlSampler(), run_dir)


def samples(found: TierReport) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in found.collect()
        for sample in family.samples
        if sample.name.startswith("inferscale_gpu_arena_")
    }


@pytest.mark.parametrize("where", [lambda bench: None, lambda bench: bench.folder])
def test_without_a_gpu_arena_nothing_is_said_of_it(
    bench: Bench, where: Callable[[Bench], Path | None]
) -> None:
    found = report(bench, where(bench))
    assert "gpu" not in found.status()["tiers"]
    assert samples(found) == {}


def test_the_status_and_the_metrics_have_its_figures(bench: Bench) -> None:
    bench.put("a", 5)
    bench.fetch("a")
    bench.fetch("a")
    bench.tier.keep()
    found = report(bench, bench.folder)
    gpu = found.status()["tiers"]["gpu"]
    assert (gpu["hits"], gpu["misses"], gpu["used_bytes"]) == (1, 1, 80)
    assert samples(found)["inferscale_gpu_arena_hits_total"] == 1
    assert samples(found)["inferscale_gpu_arena_budget_bytes"] == ROWS * ROW_BYTES
