"""Scaling of a PersonalizedModel: from what was observed to size, conditions, status and Event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from pydantic import ValidationError

from inferscale_operator.api.autoscaling import Autoscaling, AutoscalingStatus
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.autoscaling import RUNNING, WAITING, needed_signals
from inferscale_operator.desired.kinds import (
    AUTOSCALER,
    DEPLOYMENT,
    SCALED_OBJECT,
    SERVICE,
    Manifest,
)
from inferscale_operator.desired.naming import Owner
from inferscale_operator.desired.selection import activator_name, activator_selector
from inferscale_operator.planner.conditions import (
    MESSAGE_LIMIT,
    Draft,
    parse_timestamp,
    timestamp,
)
from inferscale_operator.planner.load import ALIASES, names_of, total_load
from inferscale_operator.planner.plan import Defaults, EventRecord, Observed
from inferscale_operator.planner.rollout import ready_replicas
from inferscale_operator.planner.scaling import (
    ScalingDecision,
    ScalingSettings,
    ScalingState,
    decide_scaling,
)
from inferscale_operator.planner.tiers import ready_pods

LOOK_SECONDS = 10.0
"""How often servers are asked for their load."""

COLD_START_CHANGE = 0.25
"""A time to ready that differs by less is not written anew."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Whether the activator stands in for the servers.

    Attributes:
        activator: Whether it is ready; True where it runs outside the cluster.
        selected: Whether the live Service leads to it.
    """

    activator: bool = False
    selected: bool = False

    def asleep(self, replicas: int, ready: int) -> bool:
        """Whether the Service should lead to the activator.

        Args:
            replicas: The size that is asked for.
            ready: Ready servers.
        """
        return self.activator and (replicas == 0 or ready == 0)

    def servers(self, replicas: int, present: int) -> int:
        """Replicas of the Deployment: servers go only when the activator has taken over.

        Args:
            replicas: The size that is asked for.
            present: Replicas that the live Deployment has.
        """
        return max(1, present) if replicas == 0 and not self.selected else replicas


@dataclass(frozen=True, slots=True)
class AutoscalingDecision:
    """What a pass decides about the size.

    Attributes:
        replicas: To be written through the scale subresource; None leaves it.
        pod_costs: By name of pod: what it costs to delete it first.
        status: ``status.autoscaling``; None without scaling.
        drafts: Conditions; none is part of ``Ready``.
        events: At most one.
        requeue_seconds: When to look again.
    """

    replicas: int | None = None
    pod_costs: Mapping[str, int] = field(default_factory=dict)
    status: Manifest | None = None
    drafts: tuple[Draft, ...] = ()
    events: tuple[EventRecord, ...] = ()
    requeue_seconds: float | None = None


def observe_sleep(
    owner: Owner, spec: PersonalizedModelSpec, observed: Observed, defaults: Defaults
) -> Sleep:
    """What is so now; nothing for a model that does not scale to zero."""
    if spec.autoscaling.scale_to_zero is None:
        return Sleep()
    service = observed.children.get((SERVICE.kind, owner["metadata"]["name"]), {})
    selector = (service.get("spec") or {}).get("selector") or {}
    live = observed.children.get((DEPLOYMENT.kind, activator_name(owner)))
    outside = defaults.activator_image is None
    return Sleep(outside or ready_replicas(live) > 0, selector == activator_selector(owner))


def size_of_servers(
    spec: PersonalizedModelSpec, sleep: Sleep, live: Manifest | None
) -> PersonalizedModelSpec:
    """The spec with the replicas that a generation's Deployment should have now.

    Args:
        spec: As it is asked for.
        sleep: Of ``observe_sleep``.
        live: The generation's Deployment, or None.
    """
    if live is None or spec.autoscaling.scale_to_zero is None:
        return spec
    size = sleep.servers(spec.serving.replicas, int(live["spec"].get("replicas", 1)))
    serving = spec.serving.model_copy(update={"replicas": size})
    return spec.model_copy(update={"serving": serving})


def autoscaler_kind(spec: PersonalizedModelSpec) -> str | None:
    """Kind of the object of another autoscaler that a spec asks for, or None."""
    kinds = {"hpa": AUTOSCALER.kind, "keda": SCALED_OBJECT.kind}
    return kinds.get(spec.autoscaling.provider)


def remembered(owner: Manifest) -> AutoscalingStatus:
    """``status.autoscaling`` as it was written last; empty when it cannot be read."""
    live = (owner.get("status") or {}).get("autoscaling") or {}
    try:
        return AutoscalingStatus.model_validate(live)
    except ValidationError:
        return AutoscalingStatus()


def decide_autoscaling(
    owner: Manifest,
    spec: PersonalizedModelSpec,
    observed: Observed,
    sleep: Sleep,
    generation: str | None,
    generations: Mapping[str, Manifest],
) -> AutoscalingDecision:
    """Decides.

    Args:
        owner: The PersonalizedModel.
        spec: Its spec.
        observed: What was seen: pods, their load.
        sleep: Of ``observe_sleep``.
        generation: The generation that serves, or None.
        generations: Live Deployments by generation.
    """
    scaling, old = spec.autoscaling, remembered(owner)
    if not scaling.watches_load and old.awake_replicas is None:
        return AutoscalingDecision()
    pods = ready_pods(observed.pods, generation) if generation else []
    names = [str(pod["metadata"]["name"]) for pod in pods]
    seen = names_of(names, observed.loads)
    known = old.metric_names if seen is None else seen
    load = total_load(names, observed.loads, observed.held, observed.load_history)
    if names and not {RUNNING, WAITING} <= known.keys():
        load = replace(load, age_seconds=float("inf"))
    cold = _cold_start(pods, old.cold_start_seconds)
    present = spec.serving.replicas
    decided = decide_scaling(
        observed.now,
        present,
        _settings(scaling, sleep, cold or 0),
        load,
        _state(old),
        settled=_settled(generations),
    )
    changes = decided.replicas != present
    status = AutoscalingStatus(
        metric_names=dict(known),
        cold_start_seconds=cold,
        awake_replicas=decided.state.awake_replicas,
        last_scale_time=timestamp(observed.now) if changes else old.last_scale_time,
        reason=decided.reason[:MESSAGE_LIMIT] if changes else old.reason,
        up_since=_text(decided.state.up_since),
        up_to=decided.state.up_to,
        down_since=_text(decided.state.down_since),
        down_to=decided.state.down_to,
        idle_since=_text(decided.state.idle_since),
    )
    return AutoscalingDecision(
        replicas=decided.replicas if changes else None,
        pod_costs=_pod_costs(names, observed, present, decided),
        status=status.model_dump(by_alias=True, exclude_none=True),
        drafts=tuple(_drafts(owner, scaling, observed, sleep, seen, known)),
        events=(_event(present, decided),) if changes else (),
        requeue_seconds=min(LOOK_SECONDS, decided.next_seconds or LOOK_SECONDS),
    )


def _settled(generations: Mapping[str, Manifest]) -> bool:
    """Whether no rollout is under way.

    Pods that are missing do not count: one that finds no node must not forbid to have fewer.
    """
    statuses = [deployment.get("status") or {} for deployment in generations.values()]
    return len(statuses) == 1 and (statuses[0].get("replicas") or 0) == (
        statuses[0].get("updatedReplicas") or 0
    )


def without_servers(sleep: Sleep) -> Draft:
    """``ServerAvailable`` of a model of size 0."""
    if sleep.activator:
        message = "scaled to zero; the next request wakes it"
        return Draft("ServerAvailable", True, "Asleep", message)
    return Draft("ServerAvailable", False, "ScaledToZero", "spec.serving.replicas is 0")


def _settings(scaling: Autoscaling, sleep: Sleep, cold_start: int) -> ScalingSettings:
    target, behavior, zero = scaling.target, scaling.behavior, scaling.scale_to_zero
    # KEDA sleeps by itself; and without an activator nobody would hold requests.
    may_sleep = zero is not None and sleep.activator and scaling.provider != "keda"
    return ScalingSettings(
        minimum=scaling.awake_minimum,
        maximum=scaling.max_replicas,
        requests=target.requests,
        kv_cache=target.kv_cache_percent / 100 if target.kv_cache_percent else None,
        ttft_seconds=target.ttft_p95_ms / 1000 if target.ttft_p95_ms else None,
        tolerance=behavior.tolerance_percent / 100,
        up_seconds=behavior.up_seconds,
        down_seconds=behavior.down_seconds,
        idle_seconds=zero.idle_seconds if zero is not None and may_sleep else None,
        cold_start_seconds=cold_start,
        follows_load=scaling.provider == "operator",
        sleeps_from=scaling.awake_minimum if scaling.provider == "hpa" else None,
        wakes_in_last_size=scaling.provider == "none",
    )


def _state(old: AutoscalingStatus) -> ScalingState:
    return ScalingState(
        _time(old.up_since),
        old.up_to,
        _time(old.down_since),
        old.down_to,
        _time(old.idle_since),
        old.awake_replicas,
    )


def _time(text: str | None) -> datetime | None:
    return parse_timestamp(text) if text else None


def _text(moment: datetime | None) -> str | None:
    return timestamp(moment) if moment else None


def _cold_start(pods: list[Manifest], old: int | None) -> int | None:
    """Seconds from making to readiness, the shortest of the pods: a pod may have been unready."""
    times = [seconds for pod in pods if (seconds := _seconds_to_ready(pod)) is not None]
    if not times:
        return old
    found = min(times)
    near = old is not None and abs(found - old) <= max(5, COLD_START_CHANGE * old)
    return old if near else found


def _seconds_to_ready(pod: Manifest) -> int | None:
    made = pod["metadata"].get("creationTimestamp")
    conditions = (pod.get("status") or {}).get("conditions") or []
    ready: Manifest = next((item for item in conditions if item.get("type") == "Ready"), {})
    since = ready.get("lastTransitionTime")
    if not made or not since:
        return None
    return max(0, round((parse_timestamp(since) - parse_timestamp(made)).total_seconds()))


def _pod_costs(
    names: list[str], observed: Observed, present: int, decided: ScalingDecision
) -> dict[str, int]:
    """Pods with the fewest requests go first."""
    if not 0 < decided.replicas < present:
        return {}
    loads = {name: observed.loads[name] for name in names if name in observed.loads}
    return {name: round(load.running + load.waiting) for name, load in loads.items()}


def _event(present: int, decided: ScalingDecision) -> EventRecord:
    reason = "FellAsleep" if decided.replicas == 0 else "Woken" if present == 0 else "Scaled"
    return EventRecord("Normal", reason, f"{present} -> {decided.replicas}: {decided.reason}")


def _drafts(
    owner: Manifest,
    scaling: Autoscaling,
    observed: Observed,
    sleep: Sleep,
    seen: Mapping[str, str] | None,
    known: Mapping[str, str],
) -> list[Draft]:
    if not scaling.watches_load:
        return []
    drafts = [_scaling_ready(scaling, observed), _metrics_available(scaling, seen, known)]
    if scaling.scale_to_zero is not None:
        drafts.append(_activator_ready(sleep))
    return drafts


def _scaling_ready(scaling: Autoscaling, observed: Observed) -> Draft:
    if scaling.provider == "keda" and SCALED_OBJECT.kind not in observed.optional_kinds:
        return Draft(
            "ScalingReady",
            False,
            "KedaMissing",
            "spec.autoscaling.provider is keda, but the cluster has no ScaledObjects; "
            "install KEDA or choose another provider. The last size stays",
            warning=True,
        )
    return Draft("ScalingReady", True, "Configured")


def _metrics_available(
    scaling: Autoscaling, seen: Mapping[str, str] | None, known: Mapping[str, str]
) -> Draft:
    missing = [signal for signal in needed_signals(scaling) if signal not in known]
    if not missing:
        return Draft("MetricsAvailable", True, "Found")
    if seen is None:
        return Draft("MetricsAvailable", None, "NoAnswer", "no server has told its metrics yet")
    tried = "; ".join(f"{signal} ({' or '.join(ALIASES[signal])})" for signal in missing)
    message = (
        f"the servers' /metrics have nothing for {tried}; use a runtime image of this release. "
        "These signals are left out, and without running and waiting the last size stays"
    )
    return Draft("MetricsAvailable", False, "MetricMissing", message, warning=True)


def _activator_ready(sleep: Sleep) -> Draft:
    if sleep.activator:
        return Draft("ActivatorReady", True, "Running")
    message = "the activator does not run (yet); the model is not scaled to zero meanwhile"
    return Draft("ActivatorReady", False, "NoReadyPod", message)
