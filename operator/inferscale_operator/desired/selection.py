"""Which pods belong to a model's servers, and to one generation of them."""

from __future__ import annotations

from inferscale_operator.desired import naming

COMPONENT = "server"
ROUTER = "router"
"""Component of what stands before the servers."""


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


def service_selector(
    owner: naming.Owner, generation: str, *, routed: bool = False
) -> dict[str, str]:
    """What the Service of a model leads to.

    Args:
        owner: The PersonalizedModel.
        generation: The generation that serves.
        routed: Whether a router of this generation is ready.
    """
    return router_selector(owner, generation) if routed else generation_selector(owner, generation)


def deployment_name(owner: naming.Owner, generation: str) -> str:
    """Name of a generation's Deployment."""
    return f"{owner['metadata']['name']}-{generation}"
