"""NetworkPolicies: who may reach pods. What pods may reach is left to the cluster's policies."""

from __future__ import annotations

from collections.abc import Sequence

from inferscale_operator.api.personalizedmodel import NetworkAccess
from inferscale_operator.desired import naming, paths
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.kinds import NETWORK_POLICY, Manifest

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that every namespace carries its own name in."""


def build_encoder_policy(owner: naming.Owner, defaults: Defaults) -> Manifest:
    """The operator and Prometheus may reach the encoder's status port, nobody else."""
    names = {*defaults.metrics_namespaces, defaults.operator_namespace} - {None}
    peers = [_namespace(str(name)) for name in sorted(map(str, names))]
    return _policy(owner, "encoder", (paths.STATUS_PORT,), peers)


def build_server_policy(
    owner: naming.Owner, access: NetworkAccess, defaults: Defaults, *, routed: bool = False
) -> Manifest | None:
    """Own namespace, named namespaces, operator and Prometheus may call; None when switched off.

    It is about all pods of the model, routers included: their port has the same name. A server's
    metrics are on the port of its API.
    """
    if not access.enabled:
        return None
    own = owner["metadata"]["namespace"]
    named = {*access.namespaces, *defaults.metrics_namespaces}
    others = {*named, defaults.operator_namespace or own} - {own}
    peers: list[Manifest] = [{"podSelector": {}}]
    peers.extend(_namespace(name) for name in sorted(others))
    ports = (paths.HTTP_PORT, *([paths.METRICS_PORT] if routed else []))
    return _policy(owner, "server", ports, peers)


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: name}}}


def _policy(
    owner: naming.Owner, component: str, ports: Sequence[str], peers: list[Manifest]
) -> Manifest:
    spec: Manifest = {
        "podSelector": {"matchLabels": naming.owner_labels(owner)},
        "policyTypes": ["Ingress"],
    }
    if peers:  # without a rule, nothing may come in
        opened = [{"port": port, "protocol": "TCP"} for port in ports]
        spec["ingress"] = [{"from": peers, "ports": opened}]
    name = f"{owner['metadata']['name']}-{component}"
    return naming.child(NETWORK_POLICY, owner, name, component, {"spec": spec})
