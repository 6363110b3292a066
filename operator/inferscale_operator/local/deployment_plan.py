"""What a Deployment's controller does next: rolling update of pods, status; pure.

Pods hang on the Deployment itself, without ReplicaSets between. Strategy and conditions are those
of the Kubernetes Deployment controller; ``minReadySeconds`` and ``paused`` are not looked at.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.desired.naming import digest
from inferscale_operator.local.pod_status import is_ready

TEMPLATE = "pod-template-hash"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """What to do now.

    Attributes:
        create: How many pods of the present template to make.
        delete: Pods to delete.
        status: The whole status.
    """

    create: int = 0
    delete: tuple[Manifest, ...] = ()
    status: Manifest = field(default_factory=dict)


def plan_deployment(
    deployment: Manifest, pods: Sequence[Manifest], now: datetime
) -> DeploymentPlan:
    """Decides.

    Args:
        deployment: The live Deployment.
        pods: All pods that it owns.
        now: Time, UTC.
    """
    spec = deployment["spec"]
    wanted = _replicas(spec)
    ended = [pod for pod in pods if _has_ended(pod) and not _is_going(pod)]
    active = sorted(
        (pod for pod in pods if not _has_ended(pod) and not _is_going(pod)),
        key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]),
    )
    mark = template_hash(spec["template"])
    new = [pod for pod in active if pod["metadata"]["labels"].get(TEMPLATE) == mark]
    old = [pod for pod in active if pod["metadata"]["labels"].get(TEMPLATE) != mark]
    surge, unavailable = _limits(spec, wanted)
    if _recreates(spec):
        create = 0 if old or any(_is_going(pod) for pod in pods) else max(0, wanted - len(new))
        delete = old
    else:
        create = max(0, min(wanted - len(new), wanted + surge - len(active)))
        delete = _old_to_delete(new, old, wanted - unavailable)
    # Those that are not ready go first, then those that cost least.
    surplus = sorted(new, key=lambda pod: (is_ready(pod), _cost(pod)))[: max(0, len(new) - wanted)]
    return DeploymentPlan(
        create=create,
        delete=(*ended, *delete, *surplus),
        status=_status(deployment, new, active, wanted - unavailable, now),
    )


def template_hash(template: Manifest) -> str:
    """Digest of a pod template."""
    return digest(template)


def build_pod(deployment: Manifest, name: str) -> Manifest:
    """One pod of a Deployment."""
    metadata, template = deployment["metadata"], deployment["spec"]["template"]
    own = template.get("metadata") or {}
    mark = template_hash(template)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{metadata['name']}-{mark[:5]}-{name}",
            "namespace": metadata["namespace"],
            "labels": {**(own.get("labels") or {}), TEMPLATE: mark},
            "annotations": dict(own.get("annotations") or {}),
            "ownerReferences": [
                {
                    "apiVersion": deployment["apiVersion"],
                    "kind": deployment["kind"],
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": copy.deepcopy(template["spec"]),
    }


def _old_to_delete(
    new: Sequence[Manifest], old: Sequence[Manifest], least_available: int
) -> list[Manifest]:
    """Old pods that may go: those that are not ready, and as many others as availability allows."""
    dead = [pod for pod in old if not is_ready(pod)]
    alive = [pod for pod in old if is_ready(pod)]
    spare = sum(is_ready(pod) for pod in new) + len(alive) - least_available
    return dead + alive[: max(0, spare)]


def _limits(spec: Manifest, wanted: int) -> tuple[int, int]:
    rolling = (spec.get("strategy") or {}).get("rollingUpdate") or {}
    surge = _amount(rolling.get("maxSurge", "25%"), wanted, up=True)
    unavailable = _amount(rolling.get("maxUnavailable", "25%"), wanted, up=False)
    # Both zero would never move; Kubernetes takes one away then.
    return (surge, unavailable) if surge or unavailable else (0, 1)


def _amount(value: Any, wanted: int, *, up: bool) -> int:
    if isinstance(value, str) and value.endswith("%"):
        product = int(value[:-1]) * wanted
        return -(-product // 100) if up else product // 100
    return int(value)


def _replicas(spec: Manifest) -> int:
    replicas = spec.get("replicas")
    return 1 if replicas is None else int(replicas)


def _recreates(spec: Manifest) -> bool:
    return bool((spec.get("strategy") or {}).get("type") == "Recreate")


def _cost(pod: Manifest) -> int:
    text = (pod["metadata"].get("annotations") or {}).get(DELETION_COST, "0")
    try:
        return int(text)
    except ValueError:
        return 0


def _has_ended(pod: Manifest) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _is_going(pod: Manifest) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _status(
    deployment: Manifest,
    new: Sequence[Manifest],
    active: Sequence[Manifest],
    least_available: int,
    now: datetime,
) -> Manifest:
    wanted = _replicas(deployment["spec"])
    ready = sum(is_ready(pod) for pod in active)
    complete = len(new) == len(active) == wanted and ready == wanted
    old = deployment.get("status") or {}
    counts: Manifest = {
        "observedGeneration": deployment["metadata"].get("generation", 0),
        "replicas": len(active),
        "updatedReplicas": len(new),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "unavailableReplicas": max(0, wanted - ready),
    }
    moved = any(old.get(key) != value for key, value in counts.items())
    available = ("True", "MinimumReplicasAvailable", "Deployment has minimum availability.")
    if ready < least_available:
        available = (
            "False",
            "MinimumReplicasUnavailable",
            "Deployment does not have minimum availability.",
        )
    conditions = [
        _condition(old, "Available", available, now),
        _progress(deployment, old, complete=complete, moved=moved, now=now),
    ]
    return {**counts, "conditions": conditions}


def _progress(
    deployment: Manifest, old: Manifest, *, complete: bool, moved: bool, now: datetime
) -> Manifest:
    if complete:
        content = ("True", "NewReplicaSetAvailable", "all pods are of the present template")
        return _condition(old, "Progressing", content, now)
    before = _of_type(old, "Progressing")
    since = before.get("lastUpdateTime", _format(now)) if not moved else _format(now)
    deadline = deployment["spec"].get("progressDeadlineSeconds")
    waited = (now - datetime.fromisoformat(since.replace("Z", "+00:00"))).total_seconds()
    content = ("True", "ReplicaSetUpdated", "pods are being replaced or are starting")
    if deadline is not None and waited >= deadline:
        content = ("False", "ProgressDeadlineExceeded", f"no progress for {deadline} s")
    return _condition(old, "Progressing", content, now) | {"lastUpdateTime": since}


def _condition(old: Manifest, kind: str, content: tuple[str, str, str], now: datetime) -> Manifest:
    status, reason, message = content
    before = _of_type(old, kind)
    same = before.get("status") == status
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": before["lastTransitionTime"] if same else _format(now),
    }


def _of_type(status: Manifest, kind: str) -> Manifest:
    return next((item for item in status.get("conditions") or [] if item["type"] == kind), {})


def _format(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
