"""Which generation of servers gets the traffic, which comes up, which goes.

A generation is a Deployment of its own. The Service names the one that serves; that is the only
memory of a rollout, so that nothing is lost with a status or an annotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferscale_operator.desired.kinds import Manifest


@dataclass(frozen=True, slots=True)
class Rollout:
    """The next step.

    Attributes:
        serving: Generation that the Service should select now, or None when there is none.
        coming: Generation that comes up beside it, or None.
        remove: Generations whose Deployments are to be deleted.
    """

    serving: str | None
    coming: str | None
    remove: tuple[str, ...]


def decide_rollout(
    selected: str | None, target: str | None, deployments: Mapping[str, Manifest]
) -> Rollout:
    """Decides one step.

    Args:
        selected: Generation that the live Service selects, or None without a Service.
        target: Generation of the current spec, or None while it cannot be known (a store is not
            encoded yet): then what serves goes on serving.
        deployments: Live Deployments by generation, those being deleted left out.

    Returns:
        The step. Traffic moves only to a generation that is complete; the one that it left is
        removed only after the Service was seen to select the new one.
    """
    alive = selected if selected in deployments else None
    if target is None:
        remove = [name for name in deployments if name != alive] if alive else []
        return Rollout(alive, None, tuple(sorted(remove)))
    if alive is None or alive == target:
        remove = [name for name in deployments if name != target]
        # Without a live Service the first complete generation would do, but only the target is
        # known to fit the spec.
        return Rollout(target, None, tuple(sorted(remove)))
    ready = target in deployments and is_complete(deployments[target])
    if ready:
        # The old generation stays for this step: the Service has not been seen to move yet.
        remove = [name for name in deployments if name not in (alive, target)]
        return Rollout(target, None, tuple(sorted(remove)))
    remove = [name for name in deployments if name not in (alive, target)]
    return Rollout(alive, target, tuple(sorted(remove)))


def is_complete(deployment: Manifest) -> bool:
    """Whether all pods of the present template are available and no older ones are left."""
    status = deployment.get("status", {})
    wanted = int(deployment["spec"].get("replicas", 1))
    return (
        int(status.get("observedGeneration", 0)) >= int(deployment["metadata"]["generation"])
        and int(status.get("updatedReplicas", 0)) == wanted
        and int(status.get("replicas", 0)) == wanted
        and int(status.get("availableReplicas", 0)) == wanted
    )


def ready_replicas(deployment: Manifest | None) -> int:
    """Ready pods of a Deployment; 0 without one."""
    return int((deployment or {}).get("status", {}).get("readyReplicas", 0) or 0)


def config_maps(deployment: Manifest) -> set[str]:
    """Names of the ConfigMaps that a Deployment's pods mount."""
    pod = (deployment["spec"].get("template") or {}).get("spec") or {}
    volumes = pod.get("volumes") or []
    return {item["configMap"]["name"] for item in volumes if "configMap" in item}


def summary(generation: str | None, deployment: Manifest) -> Manifest:
    """A generation as the status shows it."""
    return {
        "name": deployment["metadata"]["name"],
        "hash": generation or "",
        "readyReplicas": ready_replicas(deployment),
    }
