"""ServiceAccounts of pods, and their rights.

Servers and jobs have no rights and no token: they never call the API server. Routers look for the
pods of servers, activators change the size of their model.
"""

from __future__ import annotations

from inferscale_operator.desired import naming
from inferscale_operator.desired.kinds import ROLE, ROLE_BINDING, SERVICE_ACCOUNT, Manifest


def account_name(owner: naming.Owner, component: str) -> str:
    """Name of the account of a resource's pods."""
    return f"{owner['metadata']['name']}-{component}"


def build_account(owner: naming.Owner, component: str) -> Manifest:
    """The account.

    Annotations that others put on it (cloud identities for object storage) stay.

    Args:
        owner: The custom resource.
        component: ``encoder``, ``server``, ``router`` or ``activator``.
    """
    return naming.child(
        SERVICE_ACCOUNT,
        owner,
        account_name(owner, component),
        component,
        {"automountServiceAccountToken": False},
    )


def build_role(owner: naming.Owner, component: str, rules: list[Manifest]) -> list[Manifest]:
    """A Role for the account of a component, and its binding.

    Args:
        owner: The custom resource.
        component: The account's component.
        rules: Of the Role; rights that the operator has itself.
    """
    name = account_name(owner, component)
    role = naming.child(ROLE, owner, name, component, {"rules": rules})
    binding = {
        "roleRef": {"apiGroup": ROLE.group, "kind": ROLE.kind, "name": name},
        "subjects": [
            {
                "kind": SERVICE_ACCOUNT.kind,
                "name": name,
                "namespace": owner["metadata"]["namespace"],
            }
        ],
    }
    return [role, naming.child(ROLE_BINDING, owner, name, component, binding)]
