from __future__ import annotations

from typing import Any

from inferscale_operator.cluster.cache import ChildCache
from inferscale_operator.desired.kinds import JOB, MEMORY_STORE, PERSONALIZED_MODEL, POD
from inferscale_operator.desired.naming import owner_labels
from inferscale_operator.handlers.events import Router
from inferscale_operator.handlers.hearing import Hearing
from inferscale_operator.handlers.work_queue import WorkQueue

STORE = ("MemoryStore", "ns", "m")
MODEL = ("PersonalizedModel", "ns", "p")


def store(version: int, **more: Any) -> dict[str, Any]:
    metadata = {"name": "m", "namespace": "ns", "resourceVersion": str(version), **more}
    return {"kind": "MemoryStore", "metadata": metadata, "spec": {}}


def model(version: int, *stores: str) -> dict[str, Any]:
    return {
        "kind": "PersonalizedModel",
        "metadata": {"name": "p", "namespace": "ns", "resourceVersion": str(version)},
        "spec": {"memoryStores": [{"name": name} for name in stores]},
    }


def job(version: int) -> dict[str, Any]:
    labels = owner_labels(store(1))
    metadata = {"name": "j", "namespace": "ns", "uid": "u", "resourceVersion": str(version)}
    return {"metadata": metadata | {"labels": labels}}


class Bench:
    def __init__(self) -> None:
        self.queue = WorkQueue()
        self.cache = ChildCache()
        self.hearing = Hearing(clock=lambda: 7.0)
        self.router = Router(self.cache, self.queue, self.hearing)

    def queued(self) -> list[Any]:
        keys = list(self.queue._ready)
        self.queue._ready.clear()
        return keys


def test_change_of_a_resource_queues_it_once_per_version() -> None:
    bench = Bench()
    bench.router.event(MEMORY_STORE, "ADDED", store(5))
    assert bench.queued() == [STORE]
    bench.router.event(MEMORY_STORE, "MODIFIED", store(5))
    assert bench.queued() == []
    bench.router.event(MEMORY_STORE, "MODIFIED", store(6))
    assert bench.queued() == [STORE]


def test_own_write_does_not_come_back_as_news() -> None:
    bench = Bench()
    bench.router.event(MEMORY_STORE, "ADDED", store(5))
    bench.queued()
    bench.router.wrote(store(6))
    bench.router.event(MEMORY_STORE, "MODIFIED", store(6))
    assert bench.queued() == []
    bench.router.event(MEMORY_STORE, "MODIFIED", store(7))
    assert bench.queued() == [STORE]


def test_store_queues_the_models_that_use_it() -> None:
    bench = Bench()
    bench.router.event(PERSONALIZED_MODEL, "ADDED", model(1, "m", "n"))
    bench.queued()
    bench.router.event(MEMORY_STORE, "ADDED", store(2))
    assert bench.queued() == [STORE, MODEL]
    bench.router.wrote(store(3))
    assert bench.queued() == [MODEL], "its own status is news for the models"
    bench.router.event(PERSONALIZED_MODEL, "MODIFIED", model(4, "n"))
    bench.queued()
    bench.router.event(MEMORY_STORE, "MODIFIED", store(5))
    assert bench.queued() == [STORE]


def test_deletion_of_a_store_queues_both() -> None:
    bench = Bench()
    bench.router.event(PERSONALIZED_MODEL, "ADDED", model(1, "m"))
    bench.router.event(MEMORY_STORE, "ADDED", store(2))
    bench.queued()
    bench.router.event(MEMORY_STORE, "DELETED", store(3))
    assert bench.queued() == [STORE, MODEL]
    assert bench.router.known == [MODEL]


def test_write_that_released_the_resource_leaves_no_trace() -> None:
    bench = Bench()
    bench.router.event(MEMORY_STORE, "ADDED", store(2))
    bench.router.event(MEMORY_STORE, "DELETED", store(3))
    bench.router.wrote(store(3, deletionTimestamp="2026-01-01T00:00:00Z"))
    assert bench.router.known == []


def test_child_queues_its_owner() -> None:
    bench = Bench()
    bench.router.event(JOB, "ADDED", job(4))
    assert bench.queued() == [STORE]
    bench.router.event(JOB, "MODIFIED", job(4))
    assert bench.queued() == []
    bench.router.event(JOB, "DELETED", job(5))
    assert bench.queued() == [STORE]
    bench.router.event(JOB, "DELETED", job(5))
    assert bench.queued() == []


def test_list_of_a_new_watch_proves_no_hearing() -> None:
    bench = Bench()
    bench.router.event(JOB, "", job(4))
    assert bench.hearing.ages() == {}
    bench.router.event(JOB, "MODIFIED", job(5))
    assert bench.hearing.ages() == {"Job": 0.0}


def test_two_misses_with_nothing_told_in_between_are_deafness() -> None:
    hearing = Hearing()
    hearing.missed(JOB)
    assert hearing.deaf() is None
    hearing.heard(JOB)
    hearing.missed(JOB)
    assert hearing.deaf() is None
    hearing.heard(POD)
    hearing.missed(JOB)
    assert hearing.deaf() == "the watch of Job does not tell of changes that a list shows"
    hearing.heard(JOB)
    assert hearing.deaf() is None


def placed(version: int, tier: str, ready: int = 1, *, others: str = "a") -> dict[str, Any]:
    stores = [{"name": "m", "tier": tier, "reason": others}]
    status = {"readyReplicas": ready, "placement": {"metricsFresh": True, "stores": stores}}
    return {**model(version, "m"), "status": status}


def test_stores_are_looked_at_when_a_model_keeps_them_elsewhere() -> None:
    bench = Bench()
    bench.router.event(PERSONALIZED_MODEL, "ADDED", model(1, "m"))
    assert bench.queued() == [MODEL]
    bench.router.wrote(placed(2, "disk"))
    assert bench.queued() == [STORE]
    bench.router.wrote(placed(3, "disk", others="b"))
    assert bench.queued() == []
    bench.router.event(PERSONALIZED_MODEL, "MODIFIED", placed(4, "dram"))
    assert bench.queued() == [MODEL, STORE]
    bench.router.wrote(placed(5, "dram", ready=0))
    assert bench.queued() == [STORE]
    bench.router.wrote(placed(6, "dram"))
    bench.queued()
    bench.router.event(PERSONALIZED_MODEL, "DELETED", placed(7, "dram"))
    assert bench.queued() == [MODEL, STORE]


def test_models_of_a_store_are_known() -> None:
    bench = Bench()
    bench.router.event(PERSONALIZED_MODEL, "ADDED", model(1, "m", "n"))
    assert bench.router.models_of(STORE) == ["p"]
    bench.router.event(PERSONALIZED_MODEL, "MODIFIED", model(2, "n"))
    assert bench.router.models_of(STORE) == []
