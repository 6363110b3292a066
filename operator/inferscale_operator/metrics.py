"""Prometheus metrics of the operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as CounterMetric

from inferscale_operator.cluster.cache import ChildCache, OwnerKey
from inferscale_operator.handlers.hearing import Hearing
from inferscale_operator.handlers.work_queue import WorkQueue

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STATUS_VALUES = {"True": 1.0, "False": 0.0}


class OperatorMetrics:
    """All figures; also takes those of the reconciler.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._reconciles = CounterMetric(
            "inferscale_operator_reconciles",
            "Passes over custom resources, by result: unchanged, changed, gone, conflict, error",
            ["kind", "result"],
            registry=registry,
        )
        self._seconds = Histogram(
            "inferscale_operator_reconcile_seconds",
            "Duration of a pass",
            ["kind"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._errors = CounterMetric(
            "inferscale_operator_errors",
            "Failed passes, by reason",
            ["kind", "reason"],
            registry=registry,
        )
        self._requests = CounterMetric(
            "inferscale_operator_api_requests",
            "Requests to the API server, without those of the watches; code 'error': no answer",
            ["verb", "code"],
            registry=registry,
        )
        self._leader = Gauge(
            "inferscale_operator_leader", "1 while this process acts", registry=registry
        )
        self._conditions = Gauge(
            "inferscale_operator_conditions",
            "Custom resources by condition and its status",
            ["kind", "type", "status"],
            registry=registry,
        )
        self._condition = Gauge(
            "inferscale_resource_condition",
            "Condition of one resource: 1 true, 0 false, -1 unknown",
            ["kind", "namespace", "name", "type"],
            registry=registry,
        )
        self._depth = Gauge(
            "inferscale_operator_queue_depth", "Resources that wait for a worker", registry=registry
        )
        self._age = Gauge(
            "inferscale_operator_queue_age_seconds",
            "How long the first resource has waited for a worker",
            registry=registry,
        )
        self._children = Gauge(
            "inferscale_operator_cached_children", "Children held in memory", registry=registry
        )
        self._watch_age = Gauge(
            "inferscale_operator_watch_age_seconds",
            "Time since the watch of a kind told of a change",
            ["kind"],
            registry=registry,
        )
        self._known: dict[OwnerKey, dict[str, str]] = {}
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._leader.set(0)

    def follow(self, queue: WorkQueue, cache: ChildCache) -> None:
        """Queue and cache are asked when metrics are read."""
        self._depth.set_function(lambda: queue.depth)
        self._age.set_function(lambda: queue.age_seconds)
        self._children.set_function(lambda: len(cache))

    def read_hearing(self, hearing: Hearing) -> None:
        """Takes the age of each watch; called before metrics are read."""
        for kind, seconds in hearing.ages().items():
            self._watch_age.labels(kind).set(seconds)

    def leads(self, leader: bool) -> None:
        """Whether this process acts."""
        self._leader.set(1 if leader else 0)

    def requested(self, verb: str, code: str) -> None:
        """One request to the API server."""
        self._requests.labels(verb, code).inc()

    def reconciled(self, key: OwnerKey, result: str, seconds: float) -> None:
        """One pass ended."""
        self._reconciles.labels(key[0], result).inc()
        self._seconds.labels(key[0]).observe(seconds)

    def failed(self, key: OwnerKey, reason: str) -> None:
        """One pass failed."""
        self._errors.labels(key[0], reason).inc()

    def conditions(self, key: OwnerKey, conditions: Mapping[str, str]) -> None:
        """Type to status of a resource's conditions."""
        before = self._known.get(key, {})
        if before == conditions:
            return
        for name in before.keys() - conditions.keys():
            self._condition.remove(*key, name)
        for name, status in conditions.items():
            self._condition.labels(*key, name).set(_STATUS_VALUES.get(status, -1.0))
        self._count(key[0], before, -1)
        self._count(key[0], conditions, 1)
        self._known[key] = dict(conditions)

    def gone(self, key: OwnerKey) -> None:
        """A resource is not there any more: its series end."""
        self.conditions(key, {})
        self._known.pop(key, None)

    def _count(self, kind: str, conditions: Mapping[str, str], step: int) -> None:
        for name, status in conditions.items():
            self._counts[kind, name, status] += step
            self._conditions.labels(kind, name, status).set(self._counts[kind, name, status])
