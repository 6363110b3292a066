"""PodMonitor of the Prometheus operator, made where the cluster knows the kind."""

from __future__ import annotations

from collections.abc import Container

from inferscale_operator.desired import naming, paths
from inferscale_operator.desired.kinds import POD_MONITOR, Manifest
from inferscale_operator.desired.selection import COMPONENT, server_selector


def build_pod_monitor(owner: naming.Owner, optional_kinds: Container[str]) -> Manifest | None:
    """The PodMonitor of all server pods; None where the kind is unknown.

    Args:
        owner: The PersonalizedModel.
        optional_kinds: Optional kinds that the cluster knows.
    """
    if POD_MONITOR.kind not in optional_kinds:
        return None
    spec = {
        "podMetricsEndpoints": [{"path": "/metrics", "port": paths.HTTP_PORT}],
        "podTargetLabels": [naming.OWNER, naming.GENERATION],
        "selector": {"matchLabels": server_selector(owner)},
    }
    return naming.child(POD_MONITOR, owner, owner["metadata"]["name"], COMPONENT, {"spec": spec})
