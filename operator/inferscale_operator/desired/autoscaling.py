"""Objects of other autoscalers.

They write the PersonalizedModel's replicas through its scale subresource, and the Deployment
follows, so two writers never meet in one field. They are made once a server was seen to have the
metrics that they name.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from inferscale_operator.api.autoscaling import Autoscaling, ScalingBehavior
from inferscale_operator.api.base import API_VERSION
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired import naming
from inferscale_operator.desired.kinds import AUTOSCALER, SCALED_OBJECT, Manifest
from inferscale_operator.desired.quantities import canonical_quantity
from inferscale_operator.desired.selection import COMPONENT, activator_name

RUNNING, WAITING, KV_CACHE, TTFT = "running", "waiting", "kvCache", "ttft"
"""Signals, as ``status.autoscaling.metricNames`` calls them."""

HPA_REQUESTS = "vllm_num_requests"
HPA_KV_CACHE = "vllm_kv_cache_usage"
HPA_TTFT = "vllm_ttft_p95_seconds"
"""Metrics of pods that the cluster's metrics adapter has to serve; see docs/autoscaling.md."""

HELD = "inferscale_activator_held_requests"
HELD_WINDOW = "2m"
"""A model that was just woken counts as in use until its servers are scraped."""

POLLING_SECONDS = 30
COOLDOWN_SECONDS = 300
LONGEST_WINDOW_SECONDS = 3600
"""Of a HorizontalPodAutoscaler's stabilisation."""


def needed_signals(autoscaling: Autoscaling) -> tuple[str, ...]:
    """The signals that a spec's targets are about."""
    found = [RUNNING, WAITING]
    found += [KV_CACHE] if autoscaling.target.kv_cache_percent is not None else []
    # First tokens also tell whether anybody asked between two looks.
    wanted = autoscaling.target.ttft_p95_ms is not None or autoscaling.scale_to_zero is not None
    return (*found, *([TTFT] if wanted else []))


def build_autoscaler(
    owner: naming.Owner,
    spec: PersonalizedModelSpec,
    optional_kinds: Container[str],
    names: Mapping[str, str],
) -> Manifest | None:
    """The autoscaler that the spec asks for.

    Args:
        owner: The PersonalizedModel.
        spec: Its spec.
        optional_kinds: Optional kinds that the cluster knows.
        names: vLLM's metric name of each signal that a server was seen to have.

    Returns:
        None when none is wanted, KEDA is wanted and not installed, or no server was seen to count
        its requests yet.
    """
    autoscaling, name = spec.autoscaling, owner["metadata"]["name"]
    if RUNNING not in names or WAITING not in names:
        return None
    if autoscaling.provider == "hpa":
        body = {"spec": _horizontal(owner, autoscaling, names)}
        return naming.child(AUTOSCALER, owner, name, COMPONENT, body)
    if autoscaling.provider == "keda" and SCALED_OBJECT.kind in optional_kinds:
        body = {"spec": _scaled_object(owner, autoscaling, names)}
        return naming.child(SCALED_OBJECT, owner, name, COMPONENT, body)
    return None


def _target(owner: naming.Owner) -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
    }


def _behavior(behavior: ScalingBehavior) -> Manifest:
    return {
        "scaleDown": {
            "stabilizationWindowSeconds": min(behavior.down_seconds, LONGEST_WINDOW_SECONDS)
        },
        "scaleUp": {"stabilizationWindowSeconds": min(behavior.up_seconds, LONGEST_WINDOW_SECONDS)},
    }


def _horizontal(
    owner: naming.Owner, autoscaling: Autoscaling, names: Mapping[str, str]
) -> Manifest:
    target = autoscaling.target
    wanted = [(HPA_REQUESTS, str(target.requests))]
    if target.kv_cache_percent is not None and KV_CACHE in names:
        wanted.append((HPA_KV_CACHE, f"{target.kv_cache_percent * 10}m"))
    if target.ttft_p95_ms is not None and TTFT in names:
        wanted.append((HPA_TTFT, f"{target.ttft_p95_ms}m"))
    return {
        "behavior": _behavior(autoscaling.behavior),
        "maxReplicas": autoscaling.max_replicas,
        "metrics": [
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": metric},
                    "target": {
                        "type": "AverageValue",
                        "averageValue": canonical_quantity(amount),
                    },
                },
            }
            for metric, amount in wanted
        ],
        # It does nothing while the size is 0, so that it and the activator do not meet.
        "minReplicas": autoscaling.awake_minimum,
        "scaleTargetRef": _target(owner),
    }


def _scaled_object(
    owner: naming.Owner, autoscaling: Autoscaling, names: Mapping[str, str]
) -> Manifest:
    asleep = autoscaling.scale_to_zero
    return {
        "advanced": {
            "horizontalPodAutoscalerConfig": {"behavior": _behavior(autoscaling.behavior)}
        },
        "cooldownPeriod": asleep.idle_seconds if asleep else COOLDOWN_SECONDS,
        **({"idleReplicaCount": 0} if asleep else {}),
        "maxReplicaCount": autoscaling.max_replicas,
        "minReplicaCount": autoscaling.awake_minimum,
        "pollingInterval": POLLING_SECONDS,
        "scaleTargetRef": _target(owner),
        "triggers": _triggers(owner, autoscaling, names),
    }


def _triggers(
    owner: naming.Owner, autoscaling: Autoscaling, names: Mapping[str, str]
) -> list[Manifest]:
    target, address = autoscaling.target, autoscaling.prometheus_address or ""
    held = autoscaling.scale_to_zero is not None
    wanted = [("AverageValue", requests_query(owner, names, held=held), str(target.requests))]
    if target.kv_cache_percent is not None and KV_CACHE in names:
        query = _sum(f"{names[KV_CACHE]}{_servers(owner)}")
        wanted.append(("AverageValue", query, f"{target.kv_cache_percent / 100:g}"))
    if target.ttft_p95_ms is not None and TTFT in names:
        wanted.append(("Value", ttft_query(owner, names[TTFT]), f"{target.ttft_p95_ms / 1000:g}"))
    return [
        {
            "type": "prometheus",
            "metricType": kind,
            "metadata": {"query": query, "serverAddress": address, "threshold": threshold},
        }
        for kind, query, threshold in wanted
    ]


def requests_query(owner: naming.Owner, names: Mapping[str, str], *, held: bool) -> str:
    """PromQL: running and waiting requests of all server pods of a model; 0 when there are none.

    Args:
        owner: The PersonalizedModel.
        names: vLLM's metric name of each signal.
        held: Whether requests count too that wait for a server at the activator.
    """
    parts = [_sum(f"{names[signal]}{_servers(owner)}") for signal in (RUNNING, WAITING)]
    if held:
        pods = f"{_escaped(activator_name(owner))}-[a-z0-9]+-[a-z0-9]+"
        parts.append(_sum(f"max_over_time({HELD}{_selector(owner, pods)}[{HELD_WINDOW}])"))
    return " + ".join(parts)


def ttft_query(owner: naming.Owner, name: str) -> str:
    """PromQL: 95th percentile of the time to first token in seconds; 0 without requests."""
    rate = f"sum by (le) (rate({name}_bucket{_servers(owner)}[2m]))"
    # No request at all gives NaN, which is above nothing.
    return f"(histogram_quantile(0.95, {rate}) > 0) or vector(0)"


def _sum(series: str) -> str:
    return f"(sum({series}) or vector(0))"


def _servers(owner: naming.Owner) -> str:
    """Selects server pods by namespace and name, the labels that every scrape configuration sets.

    The name's parts (generation, template hash, pod) hold no dash, so that another model whose name
    begins alike is not counted.
    """
    name = _escaped(owner["metadata"]["name"])
    return _selector(owner, f"{name}-[0-9a-f]+-[a-z0-9]+-[a-z0-9]+")


def _selector(owner: naming.Owner, pods: str) -> str:
    return f'{{namespace="{owner["metadata"]["namespace"]}",pod=~"{pods}"}}'


def _escaped(name: str) -> str:
    return re.escape(name).replace("\\", "\\\\")
