"""The tier plan of a PersonalizedModel: from what its pods report to ConfigMap, status and Event.

What holds between two passes lies in the plan's ConfigMap, so nothing is lost with the operator.
A pass that comes to the same plan writes nothing: reasons and times are those of the last change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.kinds import CONFIG_MAP, MEMORY_STORE, Manifest
from inferscale_operator.desired.naming import GENERATION
from inferscale_operator.desired.plan_map import GRANTS_KEY, build_plan_map, plan_name
from inferscale_operator.desired.runtime_config import FILE
from inferscale_operator.desired.selection import COMPONENT
from inferscale_operator.planner.conditions import MESSAGE_LIMIT, Draft, timestamp
from inferscale_operator.planner.placement import (
    PlacementPlan,
    PlacementSettings,
    PodFigures,
    StoreDemand,
    StorePlacement,
    plan_placement,
)
from inferscale_operator.planner.plan import ChildKey, EventRecord, Observed
from inferscale_operator.planner.pod_status import PodStatus, read_pod_status, total_heat
from inferscale_runtime.budget import parse_quantity

PLAN_SECONDS = 30.0
"""How often figures are asked for while servers run: half of the age at which they are stale."""

MOST_PODS = 64
"""Pods of a generation that are asked, by name: they are alike, and the smallest one counts."""

SPEEDS = ("gpu", "dram", "disk")
"""Tiers, the fastest first."""

_GRANTS = TypeAdapter(PlacementPlan)


@dataclass(frozen=True, slots=True)
class TierDecision:
    """What a pass decides about tiers.

    Attributes:
        apply: The plan's ConfigMap, once there is a plan.
        status: ``status.placement``, or None without a plan.
        drafts: ``MetricsFresh``, once there is something to say.
        events: At most one.
        requeue_seconds: When to ask again.
    """

    apply: tuple[Manifest, ...] = ()
    status: Manifest | None = None
    drafts: tuple[Draft, ...] = ()
    events: tuple[EventRecord, ...] = ()
    requeue_seconds: float | None = None


def ready_pods(pods: Iterable[Manifest], generation: str) -> list[Manifest]:
    """The ready server pods of a generation that figures are asked of, by name."""
    return sorted(
        (pod for pod in pods if _is_ready_server(pod, generation)),
        key=lambda pod: str(pod["metadata"]["name"]),
    )[:MOST_PODS]


def is_ready(pod: Manifest) -> bool:
    """Whether a pod runs, is ready and is not on its way out."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or []
    )
    return ready and status.get("phase") == "Running" and not metadata.get("deletionTimestamp")


def _is_ready_server(pod: Manifest, generation: str) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return (
        is_ready(pod)
        and labels.get("app.kubernetes.io/component") == COMPONENT
        and labels.get(GENERATION) == generation
    )


def live_tiers(model: Manifest) -> dict[str, str]:
    """Tier of each store in the ready servers of a PersonalizedModel, by name of the store."""
    status = model.get("status") or {}
    if not status.get("readyReplicas"):
        return {}
    stores = (status.get("placement") or {}).get("stores") or []
    return {str(store["name"]): str(store["tier"]) for store in stores}


def fastest_tier(store: str, references: Mapping[ChildKey, Manifest]) -> str | None:
    """Fastest tier that a store has in any of the models that use it; None without one."""
    tiers = {
        live_tiers(model).get(store)
        for (kind, _), model in references.items()
        if kind == "PersonalizedModel"
    }
    return next((tier for tier in SPEEDS if tier in tiers), None)


def decide_tiers(
    owner: Manifest,
    spec: PersonalizedModelSpec,
    observed: Observed,
    generation: str | None,
    deployment: Manifest | None,
) -> TierDecision:
    """Decides about tiers.

    Args:
        owner: The PersonalizedModel.
        spec: Its spec.
        observed: What was seen: pods, their reports, the live plan, the stores.
        generation: The generation that serves, or None.
        deployment: Its Deployment, or None.

    Returns:
        The plan that holds now: a new one, or the last one.
    """
    previous = _previous(owner, observed)
    pods = ready_pods(observed.pods, generation) if generation and deployment else []
    if not pods and previous is None:
        return TierDecision(requeue_seconds=PLAN_SECONDS if deployment else None)
    statuses = [_pod_status(pod, observed) for pod in pods]
    settings = PlacementSettings(
        gpu_arena_bytes=_arena_bytes(deployment, observed),
        gpus_per_pod=spec.serving.tensor_parallel_size,
    )
    plan = plan_placement(
        [status.figures for status in statuses],
        _demands(spec, observed, statuses),
        previous,
        settings,
    )
    draft = _metrics_fresh(plan, bool(pods))
    seconds = PLAN_SECONDS if deployment else None
    if plan.dram_bytes is None:
        return TierDecision(drafts=(draft,), requeue_seconds=seconds)
    changed = previous is None or _grants(plan) != _grants(previous)
    if previous is not None and not changed:
        plan = replace(previous, metrics_fresh=plan.metrics_fresh)
    moved = previous is None or _told(plan) != _told(previous)
    return TierDecision(
        apply=(build_plan_map(owner, _text(plan.document()), _text(_saved(plan))),),
        status=_status(owner, observed, plan, changed),
        drafts=(draft,),
        events=(_event(plan),) if moved else (),
        requeue_seconds=seconds,
    )


def _previous(owner: Manifest, observed: Observed) -> PlacementPlan | None:
    """The plan in the live ConfigMap; None without one that can be read."""
    live = observed.children.get((CONFIG_MAP.kind, plan_name(owner)), {})
    text = (live.get("data") or {}).get(GRANTS_KEY)
    if text is None:
        return None
    try:
        plan = _GRANTS.validate_json(text)
    except ValidationError:
        return None
    return plan if plan.dram_bytes is not None else None


def _saved(plan: PlacementPlan) -> Manifest:
    return {
        "dram_bytes": plan.dram_bytes,
        "gpu_bytes": plan.gpu_bytes,
        "stores": [asdict(store) for store in plan.stores],
    }


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _pod_status(pod: Manifest, observed: Observed) -> PodStatus:
    name = str(pod["metadata"]["name"])
    report = observed.reports.get(name)
    if report is None:
        return PodStatus(PodFigures(name, 0.0, None))
    return read_pod_status(name, report, observed.report_ages.get(name, 0.0))


def _arena_bytes(deployment: Manifest | None, observed: Observed) -> int:
    """Size of the GPU arena that the serving pods were started with."""
    template = ((deployment or {}).get("spec") or {}).get("template") or {}
    for volume in (template.get("spec") or {}).get("volumes") or []:
        if volume["name"] != "config":
            continue
        live = observed.children.get((CONFIG_MAP.kind, volume["configMap"]["name"]), {})
        try:
            config = json.loads((live.get("data") or {}).get(FILE, ""))
            return int(config.get("tiers", {}).get("gpu_bytes", 0))
        except (ValueError, AttributeError, TypeError):
            return 0  # somebody bent it; it is put right in this pass
    return 0


def _demands(
    spec: PersonalizedModelSpec, observed: Observed, statuses: list[PodStatus]
) -> list[StoreDemand]:
    heat = total_heat(statuses)
    found = []
    for reference in spec.memory_stores:
        name = reference.name
        live = observed.references.get((MEMORY_STORE.kind, name))
        if live is None or live["metadata"].get("deletionTimestamp"):
            continue
        try:
            placement = MemoryStoreSpec.model_validate(live.get("spec", {})).placement
        except ValidationError:
            continue  # it says so itself
        found.append(
            StoreDemand(
                name,
                int(live.get("status", {}).get("storeBytes", 0)),
                heat.get(name, 0.0),
                placement.tier,
                placement.priority,
                parse_quantity(placement.floor) if placement.floor else 0,
            )
        )
    return found


def _metrics_fresh(plan: PlacementPlan, any_pods: bool) -> Draft:
    if plan.metrics_fresh:
        return Draft("MetricsFresh", True, "Fresh")
    reason = "Stale" if any_pods else "NoReadyPod"
    return Draft("MetricsFresh", False, reason, f"{plan.reason}; the last plan stays")


def _grants(plan: PlacementPlan) -> object:
    """All of a plan that matters; reasons hold figures of the moment."""
    return plan.dram_bytes, plan.gpu_bytes, [replace(store, reason="") for store in plan.stores]


def _told(plan: PlacementPlan) -> object:
    """What of a plan is worth an Event: not each byte that a store has grown by."""
    return plan.gpu_bytes, [(store.name, store.tier) for store in plan.stores]


def _status(owner: Manifest, observed: Observed, plan: PlacementPlan, changed: bool) -> Manifest:
    old = ((owner.get("status") or {}).get("placement") or {}).get("plannedAt")
    return {
        "plannedAt": timestamp(observed.now) if changed or not old else old,
        "metricsFresh": plan.metrics_fresh,
        "dramBytes": plan.dram_bytes or 0,
        "gpuBytes": plan.gpu_bytes,
        "stores": [
            {
                "name": store.name,
                "tier": store.tier,
                "bytes": _granted(store),
                "reason": store.reason[:MESSAGE_LIMIT],
            }
            for store in plan.stores
        ],
    }


def _granted(store: StorePlacement) -> int:
    return store.gpu_bytes if store.tier == "gpu" else store.dram_bytes


def _event(plan: PlacementPlan) -> EventRecord:
    parts = [f"{store.name} -> {store.tier} ({store.reason})" for store in plan.stores]
    return EventRecord("Normal", "Placed", ("; ".join(parts) or "no store")[:MESSAGE_LIMIT])
