"""What the tiers say of themselves: a part of the status route, and gauges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inferscale_runtime.nvml import NvmlSampler
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.arena_use import StoreUse
from inferscale_runtime.tiers.device_arena import DeviceFigures
from inferscale_runtime.tiers.device_tier import read_device_figures
from inferscale_runtime.tiers.plan_file import PlanFollower
from inferscale_runtime.tiers.stats import StoreFigures

_NO_USE = StoreUse(0, 0, 0, 0, None, "dram")

_COUNTERS = {
    "hits": "Segments that requests found in the DRAM arena.",
    "misses": "Segments that requests did not find in the DRAM arena.",
    "staged_segments": "Segments read from disk into the DRAM arena.",
    "staged_bytes": "Bytes read from disk into the DRAM arena.",
    "staging_seconds": "Time spent reading segments into the DRAM arena.",
    "evictions": "Segments that left the DRAM arena to make room.",
}
_DEVICE_GAUGES = {
    "allocated_bytes": "Bytes of the GPU arena, per GPU.",
    "budget_bytes": "Bytes that copies may take in the GPU arena, per GPU.",
    "used_bytes": "Bytes that copies take in the GPU arena, per GPU.",
}
_DEVICE_COUNTERS = {
    "hits": "Pieces of segments that requests found in the GPU arena.",
    "misses": "Pieces of segments that requests did not find in the GPU arena.",
    "copied_bytes": "Bytes copied from the DRAM arena to each GPU.",
    "evictions": "Copies that left the GPU arena to make room.",
}
_GAUGES = {
    "used_bytes": "Bytes of a store in the DRAM arena.",
    "pinned_bytes": "Bytes of a store that requests hold in the DRAM arena.",
    "floor_bytes": "Bytes that other stores cannot take from a store.",
    "heat": "Segments of a store asked for per second, decaying with a half-life of five minutes.",
}


class TierReport:
    """Reads arena, plan and driver for whoever asks.

    Args:
        arena: The DRAM arena.
        follower: The plan file.
        sampler: GPU memory.
        run_dir: Where the workers leave the figures of their GPU arenas; None without workers.
    """

    def __init__(
        self,
        arena: Arena,
        follower: PlanFollower,
        sampler: NvmlSampler,
        run_dir: Path | None = None,
    ) -> None:
        self._arena = arena
        self._follower = follower
        self._sampler = sampler
        self._run_dir = run_dir

    def status(self) -> dict[str, Any]:
        """``tiers`` and ``gpu`` of the status route."""
        arena = self._arena
        device = self._device()
        return {
            "tiers": {
                **({} if device is None else {"gpu": asdict(device)}),
                "dram": {
                    "slab_bytes": arena.slab_bytes,
                    "budget_bytes": arena.budget_bytes,
                    "used_bytes": arena.used_rows * arena.row_bytes,
                    "pinned_bytes": arena.pinned_rows * arena.row_bytes,
                    "evictions": arena.evictions,
                },
                "plan": asdict(self._follower.state),
                "stores": self.stores(),
            },
            "gpu": self._sampler.status(),
        }

    def stores(self) -> dict[str, dict[str, Any]]:
        """Use, limits, counters and heat by store; the preamble's rows are under ``""``."""
        use, figures = self._arena.use_by_store(), self._arena.stats.snapshot()
        return {
            name: {
                **asdict(use.get(name, _NO_USE)),
                **asdict(figures.get(name, StoreFigures())),
            }
            for name in sorted(use.keys() | figures.keys())
        }

    def _device(self) -> DeviceFigures | None:
        return read_device_figures(self._run_dir) if self._run_dir else None

    def collect(self) -> Iterator[Any]:
        """Metrics, for ``prometheus_client.REGISTRY.register(report)``."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stores = self.stores()
        for kind, table, prefix in (
            (CounterMetricFamily, _COUNTERS, "inferscale_store_"),
            (GaugeMetricFamily, _GAUGES, "inferscale_store_arena_"),
        ):
            for field, text in table.items():
                family = kind(prefix + field, text, labels=["store"])
                for name, values in stores.items():
                    family.add_metric([name], values[field])
                yield family
        yield from self._device_metrics()
        state = self._follower.state
        yield GaugeMetricFamily(
            "inferscale_tier_plan_valid",
            "1 when the plan file's present content is in use, or no plan is followed.",
            float(state.reason is None),
        )
        yield GaugeMetricFamily(
            "inferscale_tier_plan_applied_timestamp_seconds",
            "Unix time of the last plan that was taken, 0 for none.",
            state.applied_at or 0.0,
        )

    def _device_metrics(self) -> Iterator[Any]:
        """Families without a value where there is no GPU arena."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        device = self._device()
        for kind, table in (
            (GaugeMetricFamily, _DEVICE_GAUGES),
            (CounterMetricFamily, _DEVICE_COUNTERS),
        ):
            for field, text in table.items():
                family = kind("inferscale_gpu_arena_" + field, text, labels=())
                if device is not None:
                    family.add_metric((), float(getattr(device, field)))
                yield family


def start_tiers(arena: Arena, plan_file: str, run_dir: Path | None = None) -> TierReport:
    """Starts the threads that follow the plan file and the GPU driver, and registers the metrics.

    The plan has been read once when it returns.

    Args:
        arena: The DRAM arena.
        plan_file: Path, or empty.
        run_dir: The server's shared-memory files.
    """
    from prometheus_client import REGISTRY

    follower, sampler = PlanFollower(plan_file, arena), NvmlSampler()
    follower.poll()
    follower.start()
    sampler.start()
    report = TierReport(arena, follower, sampler, run_dir)
    REGISTRY.register(report)
    REGISTRY.register(sampler)
    return report
