"""Which routers exist, and when the Service leads to them.

A router is bound to one generation. It goes before the servers that it leads to: whoever still
holds a connection to it gets answers until it has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.desired.naming import GENERATION
from inferscale_operator.desired.selection import ROUTER
from inferscale_operator.planner.conditions import Draft
from inferscale_operator.planner.pods import first_trouble
from inferscale_operator.planner.rollout import Rollout, ready_replicas

COMPONENT = "app.kubernetes.io/component"
READY = "RouterReady"


@dataclass(frozen=True, slots=True)
class Routers:
    """What a pass decides about routers.

    Attributes:
        routed: Whether the Service leads to the routers of the serving generation.
        remove: Router Deployments to be deleted.
        held: Generations whose servers stay until their routers have ended.
    """

    routed: bool
    remove: tuple[Manifest, ...]
    held: frozenset[str]


def is_router(item: Manifest) -> bool:
    """Whether a Deployment or pod is a router's."""
    return (item["metadata"].get("labels") or {}).get(COMPONENT) == ROUTER


def decide_routers(
    rollout: Rollout,
    routers: Mapping[str, Manifest],
    pods: Iterable[Manifest],
    selected: Mapping[str, str],
    *,
    wanted: bool,
) -> Routers:
    """Decides one step.

    Args:
        rollout: What was decided about servers.
        routers: Live router Deployments by generation, those being deleted left out.
        pods: Pods of the model.
        selected: Selector of the live Service.
        wanted: Whether the spec asks for a router.
    """
    kept: Collection[str | None] = (rollout.serving, rollout.coming)
    if not wanted:
        # The Service has to be seen to have moved to the servers.
        kept = (selected.get(GENERATION),) if selected.get(COMPONENT) == ROUTER else ()
    remove = tuple(item for name, item in sorted(routers.items()) if name not in kept)
    ending = {
        str(pod["metadata"]["labels"].get(GENERATION)) for pod in pods if is_router(pod)
    } | routers.keys()
    routed = wanted and ready_replicas(routers.get(rollout.serving or "")) > 0
    return Routers(routed, remove, frozenset(ending & set(rollout.remove)))


def router_drafts(routers: Routers, pods: Iterable[Manifest], *, wanted: bool) -> list[Draft]:
    """``RouterReady``, where a router is asked for; it is no part of ``Ready``.

    Args:
        routers: What was decided.
        pods: Pods of the model.
        wanted: Whether the spec asks for a router.
    """
    if not wanted:
        return []
    if routers.routed:
        return [Draft(READY, True, "Routing")]
    found = first_trouble([pod for pod in pods if is_router(pod)])
    if found is None:
        message = "no router is ready; the Service leads to the servers"
        return [Draft(READY, False, "NoReadyRouter", message)]
    image = f"spec.routing.image '{found.image}': " if found.image else ""
    text = f"{image}{found.message}; mend spec.routing; the Service leads to the servers"
    return [Draft(READY, False, found.reason, text, warning=True)]
