"""Every metric that the code has: read from the registries and collectors themselves."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from inferscale_operator.activator.metrics import ActivatorMetrics
from inferscale_operator.metrics import OperatorMetrics
from inferscale_runtime.encode import status
from inferscale_runtime.nvml import NvmlSampler
from inferscale_runtime.server import metrics as server_metrics
from inferscale_runtime.tiers.report import TierReport


@dataclass(frozen=True)
class Metric:
    """A metric as Prometheus shows it."""

    name: str
    type: str
    labels: tuple[str, ...]

    @property
    def series(self) -> set[str]:
        """Names of its series."""
        if self.type == "histogram":
            return {self.name + end for end in ("_bucket", "_sum", "_count")}
        return {self.name}


Registry = Callable[[], set[Metric]]


def _of(families: Iterable[Any]) -> Iterator[Metric]:
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        yield Metric(name, family.type, tuple(family._labelnames))


def _of_wrappers(wrappers: Iterable[MetricWrapperBase]) -> Iterator[Metric]:
    for wrapper in wrappers:
        (family,) = wrapper.describe()
        name = family.name + ("_total" if family.type == "counter" else "")
        yield Metric(name, family.type, tuple(wrapper._labelnames))


def operator() -> set[Metric]:
    registry = CollectorRegistry()
    OperatorMetrics(registry)
    return set(_of_wrappers(registry._collector_to_names))  # type: ignore[arg-type]


def activator() -> set[Metric]:
    registry = CollectorRegistry()
    ActivatorMetrics(registry)
    return set(_of_wrappers(registry._collector_to_names))  # type: ignore[arg-type]


def server() -> set[Metric]:
    arena = SimpleNamespace(use_by_store=dict, stats=SimpleNamespace(snapshot=dict))
    follower = SimpleNamespace(state=SimpleNamespace(reason=None, applied_at=None))
    sampler = NvmlSampler()
    report = TierReport(arena, follower, sampler)  # type: ignore[arg-type]
    wrappers = [item for item in vars(server_metrics).values() if _is_metric(item)]
    return {*_of_wrappers(wrappers), *_of(report.collect()), *_of(sampler.collect())}


def _is_metric(item: object) -> bool:
    return isinstance(item, MetricWrapperBase)


def encoder() -> set[Metric]:
    return set(_of(status._Collector(status.EncodeStatus()).collect()))


def vllm() -> set[str] | None:
    """Names of vLLM's own metrics without endings; None where it is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py"
    return set(re.findall(r'"(vllm:\w+)"', file.read_text(encoding="utf-8")))


ALL: tuple[Registry, ...] = (operator, server, activator, encoder)

__all__ = ["ALL", "Metric", "Registry", "activator", "encoder", "operator", "server", "vllm"]
