"""Prometheus metrics of an activator."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)


class ActivatorMetrics:
    """All figures.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.held = Gauge(
            "inferscale_activator_held_requests",
            "Requests that wait for a server",
            registry=registry,
        )
        self.requests = Counter(
            "inferscale_activator_requests",
            "Requests by result: forwarded, full, too_large, timeout, unauthorized, failed, gone",
            ["result"],
            registry=registry,
        )
        self.wake_seconds = Histogram(
            "inferscale_activator_wake_seconds",
            "Time from the first held request to a ready server",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.wake_errors = Counter(
            "inferscale_activator_wake_errors",
            "Requests to the API server for a larger size that failed",
            registry=registry,
        )
