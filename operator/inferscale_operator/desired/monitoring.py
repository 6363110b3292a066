"""PodMonitors of the Prometheus operator, made where the cluster knows the kind."""

from __future__ import annotations

from collections.abc import Container

from inferscale_operator.desired import naming, paths
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.kinds import POD_MONITOR, Manifest
from inferscale_operator.desired.selection import (
    ACTIVATOR,
    COMPONENT,
    ROUTER,
    activator_name,
    activator_selector,
    router_selector,
    server_selector,
)


def build_pod_monitors(
    owner: naming.Owner,
    optional_kinds: Container[str],
    defaults: Defaults,
    *,
    routed: bool,
    sleeps: bool,
) -> list[Manifest]:
    """The PodMonitors of all server pods and all router pods; none where the kind is unknown.

    Args:
        owner: The PersonalizedModel.
        optional_kinds: Optional kinds that the cluster knows.
        defaults: How the operator was installed.
        routed: Whether the model has routers.
        sleeps: Whether it has an activator.
    """
    if POD_MONITOR.kind not in optional_kinds:
        return []
    name = owner["metadata"]["name"]
    chosen = dict(defaults.monitor_labels)
    monitors = [_monitor(owner, name, COMPONENT, server_selector(owner), paths.HTTP_PORT, chosen)]
    if routed:
        selector, port = router_selector(owner), paths.METRICS_PORT
        monitors.append(_monitor(owner, f"{name}-{ROUTER}", ROUTER, selector, port, chosen))
    if sleeps:
        name, selector = activator_name(owner), activator_selector(owner)
        monitors.append(_monitor(owner, name, ACTIVATOR, selector, paths.HTTP_PORT, chosen))
    return monitors


def _monitor(
    owner: naming.Owner,
    name: str,
    component: str,
    selector: dict[str, str],
    port: str,
    chosen: dict[str, str],
) -> Manifest:
    spec = {
        "podMetricsEndpoints": [{"path": "/metrics", "port": port}],
        "podTargetLabels": [naming.OWNER, naming.GENERATION],
        "selector": {"matchLabels": selector},
    }
    manifest = naming.child(POD_MONITOR, owner, name, component, {"spec": spec})
    if not chosen:
        return manifest
    metadata = manifest["metadata"]
    # Those by which the operator knows its children win.
    labels = chosen | metadata["labels"]
    return naming.stamp({**manifest, "metadata": {**metadata, "labels": labels}})
