"""Which pods belong to a model's servers, and to one generation of them."""

from __future__ import annotations

from inferscale_operator.desired import naming

COMPONENT = "server"


def server_selector(owner: naming.Owner) -> dict[str, str]:
    """Labels of all server pods of a PersonalizedModel."""
    return naming.owner_labels(owner) | {"app.kubernetes.io/component": COMPONENT}


def generation_selector(owner: naming.Owner, generation: str) -> dict[str, str]:
    """Labels of the server pods of one generation."""
    return server_selector(owner) | {naming.GENERATION: generation}


def deployment_name(owner: naming.Owner, generation: str) -> str:
    """Name of a generation's Deployment."""
    return f"{owner['metadata']['name']}-{generation}"
