"""Which pods belong to a model's servers, and to one generation of them."""

from __future__ import annotations

from inferscale_operator.desired import naming

COMPONENT = "server"
ROUTER = "router"
"""Component of what stands before the servers."""
ACTIVATOR = "activator"


def server_selector(owner: naming.Owner) -> dict[str, str]:
    """Labels of all server pods of a PersonalizedModel."""
    return naming.owner_labels(owner) | {"app.kubernetes.io/component": COMPONENT}


def generation_selector(owner: naming.Owner, generation: str) -> dict[str, str]:
    """Labels of the server pods of one generation."""
    return server_selector(owner) | {naming.GENERATION: generation}


def router_selector(owner: naming.Owner, generation: str | None = None) -> dict[str, str]:
    """Labels of a model's router pods: all of them, or those of one generation."""
    chosen = {} if generation is None else {naming.GENERATION: generation}
    return naming.owner_labels(owner) | {"app.kubernetes.io/component": ROUTER} | chosen


def activator_selector(owner: naming.Owner) -> dict[str, str]:
    """Labels of the pods of a PersonalizedModel's activator."""
    return naming.owner_labels(owner) | {"app.kubernetes.io/component": ACTIVATOR}


def activator_name(owner: naming.Owner) -> str:
    """Name of the activator's Deployment."""
    return f"{owner['metadata']['name']}-{ACTIVATOR}"


def servers_service_name(owner: naming.Owner) -> str:
    """Name of the Service that always selects servers."""
    return f"{owner['metadata']['name']}-servers"


def deployment_name(owner: naming.Owner, generation: str) -> str:
    """Name of a generation's Deployment."""
    return f"{owner['metadata']['name']}-{generation}"
