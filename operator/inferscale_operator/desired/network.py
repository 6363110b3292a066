"""NetworkPolicies: who may reach pods. What pods may reach is left to the cluster's policies."""

from __future__ import annotations

from inferscale_operator.api.personalizedmodel import NetworkAccess
from inferscale_operator.desired import naming, paths
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.kinds import NETWORK_POLICY, Manifest

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that every namespace carries its own name in."""


def build_encoder_policy(owner: naming.Owner, defaults: Defaults) -> Manifest:
    """Only the operator may reach the encoder's status port; nobody, outside a cluster."""
    peers = [_namespace(defaults.operator_namespace)] if defaults.operator_namespace else []
    return _policy(owner, "encoder", paths.STATUS_PORT, peers)


def build_server_policy(
    owner: naming.Owner, access: NetworkAccess, defaults: Defaults
) -> Manifest | None:
    """Own namespace, named namespaces and the operator may call; None when switched off."""
    if not access.enabled:
        return None
    own = owner["metadata"]["namespace"]
    others = {*access.namespaces, defaults.operator_namespace or own} - {own}
    peers: list[Manifest] = [{"podSelector": {}}]
    peers.extend(_namespace(name) for name in sorted(others))
    return _policy(owner, "server", paths.HTTP_PORT, peers)


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: name}}}


def _policy(owner: naming.Owner, component: str, port: str, peers: list[Manifest]) -> Manifest:
    spec: Manifest = {
        "podSelector": {"matchLabels": naming.owner_labels(owner)},
        "policyTypes": ["Ingress"],
    }
    if peers:  # without a rule, nothing may come in
        spec["ingress"] = [{"from": peers, "ports": [{"port": port, "protocol": "TCP"}]}]
    name = f"{owner['metadata']['name']}-{component}"
    return naming.child(NETWORK_POLICY, owner, name, component, {"spec": spec})
