"""The Service of a served model. Its selector says which generation gets the traffic."""

from __future__ import annotations

from inferscale_operator.desired import naming, paths
from inferscale_operator.desired.kinds import SERVICE, Manifest
from inferscale_operator.desired.selection import COMPONENT, service_selector

PORT = 80


def build_service(owner: naming.Owner, generation: str, *, routed: bool = False) -> Manifest:
    """The Service, named as its owner.

    Args:
        owner: The PersonalizedModel.
        generation: The generation that serves.
        routed: Whether a router of this generation is ready.
    """
    spec = {
        "internalTrafficPolicy": "Cluster",
        "ports": [{"name": "http", "port": PORT, "protocol": "TCP", "targetPort": paths.HTTP_PORT}],
        "selector": service_selector(owner, generation, routed=routed),
        "sessionAffinity": "None",
        "type": "ClusterIP",
    }
    return naming.child(SERVICE, owner, owner["metadata"]["name"], COMPONENT, {"spec": spec})
