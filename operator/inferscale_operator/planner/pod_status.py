"""From a server pod's status document (``GET /inferscale/v1/status``) to planning inputs (pure).

What is missing or of a wrong type reads as "not known": a pod of another release, or one that is
just starting, makes the figures stale and never the operator fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inferscale_operator.planner.placement import PodFigures


@dataclass(frozen=True, slots=True)
class PodStatus:
    """What one pod said.

    Attributes:
        figures: Of its arenas and GPUs.
        heat: Segments asked for per second, by store.
        used_bytes: DRAM by store.
        pending: Facts that wait for their KV, by store.
    """

    figures: PodFigures
    heat: Mapping[str, float] = field(default_factory=dict)
    used_bytes: Mapping[str, int] = field(default_factory=dict)
    pending: Mapping[str, int] = field(default_factory=dict)


def read_pod_status(pod: str, document: Mapping[str, Any], fetched_seconds_ago: float) -> PodStatus:
    """Reads one status document.

    Args:
        pod: Name of the pod.
        document: The parsed JSON.
        fetched_seconds_ago: Age of the answer.
    """
    tiers, gpu = _mapping(document, "tiers"), _mapping(document, "gpu")
    stores = {
        str(name): values
        for name, values in _mapping(tiers, "stores").items()
        if name and isinstance(values, Mapping)
    }
    devices = gpu.get("devices")
    free = tuple(
        _number(device.get("free_bytes"))
        for device in (devices if isinstance(devices, list) else [])
        if isinstance(device, Mapping)
    )
    known = gpu.get("up") is True and None not in free
    age = fetched_seconds_ago + (float(_number(gpu.get("age_seconds")) or 0) if known else 0.0)
    figures = PodFigures(
        pod,
        age,
        _whole(_mapping(tiers, "dram").get("slab_bytes")),
        tuple(int(value or 0) for value in free) if known else (),
        _whole(_mapping(tiers, "gpu").get("allocated_bytes")) or 0,
    )
    return PodStatus(
        figures,
        {name: float(_number(values.get("heat")) or 0) for name, values in stores.items()},
        {name: _whole(values.get("used_bytes")) or 0 for name, values in stores.items()},
        _pending(document.get("stores")),
    )


def _pending(stores: Any) -> dict[str, int]:
    known: dict[str, int] = {}
    for entry in stores if isinstance(stores, list) else []:
        name = entry.get("name") if isinstance(entry, Mapping) else None
        count = _whole(entry.get("pending")) if isinstance(name, str) else None
        if count is not None:
            known[str(name)] = count
    return known


def total_heat(pods: Iterable[PodStatus]) -> dict[str, float]:
    """Heat of each store over all pods."""
    result: dict[str, float] = {}
    for pod in sorted(pods, key=lambda status: status.figures.name):
        for name, heat in pod.heat.items():
            result[name] = result.get(name, 0.0) + heat
    return result


def _mapping(document: Mapping[str, Any], field_name: str) -> Mapping[str, Any]:
    value = document.get(field_name)
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return value if known else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)
