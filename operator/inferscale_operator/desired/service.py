"""The Services of a served model. One function says who gets the traffic."""

from __future__ import annotations

from inferscale_operator.desired import naming, paths
from inferscale_operator.desired.kinds import SERVICE, Manifest
from inferscale_operator.desired.selection import (
    COMPONENT,
    activator_selector,
    generation_selector,
    router_selector,
    servers_service_name,
)

PORT = 80


def service_selector(
    owner: naming.Owner, generation: str, *, routed: bool = False, asleep: bool = False
) -> dict[str, str]:
    """Labels of the pods that the Service leads to: activator, else router, else servers.

    Args:
        owner: The PersonalizedModel.
        generation: The generation that serves.
        routed: Whether a router of this generation is ready.
        asleep: Whether the activator stands in for servers that are not there.
    """
    if asleep:
        return activator_selector(owner)
    return router_selector(owner, generation) if routed else generation_selector(owner, generation)


def build_service(
    owner: naming.Owner, generation: str, *, routed: bool = False, asleep: bool = False
) -> Manifest:
    """The Service that clients know, named as its owner.

    Args:
        owner: The PersonalizedModel.
        generation: The generation that serves; a label keeps it while the selector does not.
        routed: Whether a router of this generation is ready.
        asleep: Whether the activator gets the requests.
    """
    selector = service_selector(owner, generation, routed=routed, asleep=asleep)
    return _service(owner, owner["metadata"]["name"], generation, selector)


def build_servers_service(owner: naming.Owner, generation: str) -> Manifest:
    """The Service by which the activator finds ready servers, whatever the other one selects."""
    name = servers_service_name(owner)
    return _service(owner, name, generation, generation_selector(owner, generation))


def _service(owner: naming.Owner, name: str, generation: str, selector: dict[str, str]) -> Manifest:
    spec = {
        "internalTrafficPolicy": "Cluster",
        "ports": [{"name": "http", "port": PORT, "protocol": "TCP", "targetPort": paths.HTTP_PORT}],
        "selector": selector,
        "sessionAffinity": "None",
        "type": "ClusterIP",
    }
    return naming.child(SERVICE, owner, name, COMPONENT, {"spec": spec}, generation=generation)
