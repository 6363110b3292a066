"""Autoscalers.

They write the PersonalizedModel's replicas through its scale subresource, and the Deployment
follows, so two writers never meet in one field.
"""

from __future__ import annotations

import re
from collections.abc import Container

from inferscale_operator.api.base import API_VERSION
from inferscale_operator.api.personalizedmodel import Autoscaling, PersonalizedModelSpec
from inferscale_operator.desired import naming
from inferscale_operator.desired.kinds import AUTOSCALER, SCALED_OBJECT, Manifest
from inferscale_operator.desired.quantities import canonical_quantity
from inferscale_operator.desired.selection import COMPONENT

HPA_METRIC = "vllm_num_requests"
"""Metric for pods that the cluster's metrics adapter has to serve: running and waiting requests."""

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"

POLLING_SECONDS = 30
COOLDOWN_SECONDS = 300


def build_autoscaler(
    owner: naming.Owner, spec: PersonalizedModelSpec, optional_kinds: Container[str]
) -> Manifest | None:
    """The autoscaler that the spec asks for.

    Args:
        owner: The PersonalizedModel.
        spec: Its spec.
        optional_kinds: Optional kinds that the cluster knows.

    Returns:
        None when none is wanted, or KEDA is wanted and not installed.
    """
    name = owner["metadata"]["name"]
    if spec.autoscaling.provider == "hpa":
        body = {"spec": _horizontal(owner, spec.autoscaling)}
        return naming.child(AUTOSCALER, owner, name, COMPONENT, body)
    if spec.autoscaling.provider == "keda" and SCALED_OBJECT.kind in optional_kinds:
        body = {"spec": _scaled_object(owner, spec.autoscaling)}
        return naming.child(SCALED_OBJECT, owner, name, COMPONENT, body)
    return None


def _target(owner: naming.Owner) -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
    }


def _horizontal(owner: naming.Owner, autoscaling: Autoscaling) -> Manifest:
    return {
        "maxReplicas": autoscaling.max_replicas,
        "metrics": [
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": HPA_METRIC},
                    "target": {
                        "type": "AverageValue",
                        "averageValue": canonical_quantity(str(autoscaling.target.requests)),
                    },
                },
            }
        ],
        "minReplicas": autoscaling.min_replicas,
        "scaleTargetRef": _target(owner),
    }


def _scaled_object(owner: naming.Owner, autoscaling: Autoscaling) -> Manifest:
    return {
        "cooldownPeriod": COOLDOWN_SECONDS,
        "maxReplicaCount": autoscaling.max_replicas,
        "minReplicaCount": autoscaling.min_replicas,
        "pollingInterval": POLLING_SECONDS,
        "scaleTargetRef": _target(owner),
        "triggers": [
            {
                "type": "prometheus",
                "metricType": "AverageValue",
                "metadata": {
                    "query": requests_query(owner),
                    "serverAddress": autoscaling.prometheus_address or "",
                    "threshold": str(autoscaling.target.requests),
                },
            }
        ],
    }


def requests_query(owner: naming.Owner) -> str:
    """PromQL: running and waiting requests of all server pods of a model; 0 when there are none.

    Pods are told by namespace and name, the labels that every scrape configuration sets. The name's
    parts (generation, template hash, pod) hold no dash, so that another model whose name begins
    alike is not counted.
    """
    name = re.escape(owner["metadata"]["name"]).replace("\\", "\\\\")
    pods = f"{name}-[0-9a-f]+-[a-z0-9]+-[a-z0-9]+"
    series = f'{{namespace="{owner["metadata"]["namespace"]}",pod=~"{pods}"}}'
    parts = (f"sum({metric}{series})" for metric in (_RUNNING, _WAITING))
    return f"{' + '.join(parts)} or vector(0)"
