"""ServiceAccounts of pods. They have no rights and no token: pods never call the API server."""

from __future__ import annotations

from inferscale_operator.desired import naming
from inferscale_operator.desired.kinds import SERVICE_ACCOUNT, Manifest


def account_name(owner: naming.Owner, component: str) -> str:
    """Name of the account of a resource's pods."""
    return f"{owner['metadata']['name']}-{component}"


def build_account(owner: naming.Owner, component: str) -> Manifest:
    """The account.

    Annotations that others put on it (cloud identities for object storage) stay.

    Args:
        owner: The custom resource.
        component: ``encoder`` or ``server``.
    """
    return naming.child(
        SERVICE_ACCOUNT,
        owner,
        account_name(owner, component),
        component,
        {"automountServiceAccountToken": False},
    )
