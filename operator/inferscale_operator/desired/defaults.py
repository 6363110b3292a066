"""What the operator was installed with, as far as manifests depend on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the operator was installed with; the same for all resources.

    Attributes:
        runtime_image: Image of jobs and servers whose spec names none.
        operator_namespace: Namespace of the operator, for network policies; None outside a cluster.
        erase_timeout_seconds: Longest time that a deletion waits for its bytes to be erased.
        router_image: Image of routers whose spec names none.
        metrics_namespaces: Namespaces whose pods may read metrics: where Prometheus runs.
        monitor_labels: Labels on PodMonitors, by which Prometheus chooses them.
        activator_image: Image of activators; None where whoever runs the operator has one of its
            own for every model (``inferscale up``).
    """

    runtime_image: str
    operator_namespace: str | None = None
    erase_timeout_seconds: int = 600
    router_image: str = ""
    metrics_namespaces: tuple[str, ...] = ()
    monitor_labels: tuple[tuple[str, str], ...] = ()
    activator_image: str | None = None
