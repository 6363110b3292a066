"""One pass, over the cluster in memory and with plans made up by the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from inferscale_operator.cluster.cache import ChildCache, OwnerKey
from inferscale_operator.cluster.errors import ConflictError, InvalidError, UnavailableError
from inferscale_operator.cluster.lease import LeaseLostError
from inferscale_operator.desired.kinds import CONFIG_MAP, MEMORY_STORE, POD, Manifest
from inferscale_operator.desired.naming import FINALIZER, child
from inferscale_operator.handlers.execute import Executor
from inferscale_operator.handlers.reconciler import Reconciler, failed_status
from inferscale_operator.handlers.work_queue import WorkQueue
from inferscale_operator.local.memory_cluster import MemoryCluster, counted_uids
from inferscale_operator.planner.plan import Defaults, EventRecord, Observed, Plan, Ref

pytestmark = pytest.mark.asyncio
NOW = datetime(2026, 1, 2, tzinfo=UTC)
KEY: OwnerKey = ("MemoryStore", "ns", "m")
DEFAULTS = Defaults(runtime_image="image")
PlanLike = Callable[[Manifest, Observed, Defaults], Plan]


class Figures:
    def __init__(self) -> None:
        self.results: list[str] = []
        self.reasons: list[str] = []
        self.shown: Mapping[str, str] = {}
        self.ended = False

    def reconciled(self, key: OwnerKey, result: str, seconds: float) -> None:
        self.results.append(result)

    def failed(self, key: OwnerKey, reason: str) -> None:
        self.reasons.append(reason)

    def conditions(self, key: OwnerKey, conditions: Mapping[str, str]) -> None:
        self.shown = conditions

    def gone(self, key: OwnerKey) -> None:
        self.ended = True


class Recorded(MemoryCluster):
    """Counts writes; ``error`` is raised by the next one that its name matches."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: NOW, uids=counted_uids())
        self.writes: list[str] = []
        self.errors: dict[str, Exception] = {}

    def _write(self, name: str) -> None:
        self.writes.append(name)
        error = self.errors.pop(name, None)
        if error is not None:
            raise error

    async def create(self, manifest: Manifest) -> Manifest:
        self._write("create")
        return await super().create(manifest)

    async def apply(self, manifest: Manifest) -> Manifest:
        self._write("apply")
        return await super().apply(manifest)

    async def delete(self, kind: Any, namespace: str, name: str, uid: str) -> None:
        self._write("delete")
        await super().delete(kind, namespace, name, uid)

    async def scale(self, live: Manifest, replicas: int) -> None:
        self._write("scale")
        await super().scale(live, replicas)

    async def annotate(self, live: Manifest, key: str, value: str) -> None:
        self._write("annotate")
        await super().annotate(live, key, value)

    async def patch_status(self, live: Manifest, status: Manifest) -> Manifest:
        self._write("status")
        return await super().patch_status(live, status)

    async def set_finalizer(self, live: Manifest, finalizer: str, *, present: bool) -> Manifest:
        self._write("finalizer")
        return await super().set_finalizer(live, finalizer, present=present)


class Bench:
    def __init__(self, plan: PlanLike) -> None:
        self.cluster = Recorded()
        self.cache = ChildCache()
        self.queue = WorkQueue()
        self.figures = Figures()
        self.own: list[Manifest] = []
        self.reconciler = Reconciler(
            self.cluster,
            self.cache,
            self.queue,
            {"MemoryStore": plan},
            DEFAULTS,
            self.figures,
            self.own.append,
            lambda: NOW,
        )

    async def start(self) -> Manifest:
        live = await self.cluster.create(
            {
                "apiVersion": "inferscale.dev/v1alpha1",
                "kind": "MemoryStore",
                "metadata": {"name": "m", "namespace": "ns"},
                "spec": {},
            }
        )
        self.cluster.writes.clear()
        return live

    async def run(self) -> str:
        return await self.reconciler.reconcile(KEY)

    async def live(self) -> Manifest:
        found = await self.cluster.get(MEMORY_STORE, "ns", "m")
        assert found is not None
        return found

    async def ready(self) -> dict[str, Any]:
        conditions = (await self.live())["status"]["conditions"]
        return next(item for item in conditions if item["type"] == "Ready")


def config(resource: Manifest, value: str = "1") -> Manifest:
    return child(CONFIG_MAP, resource, "m-config", "encoder", {"data": {"v": value}})


def full_plan(resource: Manifest, observed: Observed, defaults: Defaults) -> Plan:
    return Plan(
        finalizer=True,
        apply=(config(resource),),
        status={"conditions": [], "tier": "disk"},
        requeue_seconds=50.0,
    )


async def test_plan_is_carried_out_once_and_rest_costs_nothing() -> None:
    bench = Bench(full_plan)
    await bench.start()
    assert await bench.run() == "changed"
    assert bench.cluster.writes == ["finalizer", "apply", "status"]
    live = await bench.live()
    assert live["metadata"]["finalizers"] == [FINALIZER]
    assert live["status"]["tier"] == "disk"
    assert len(bench.own) == 2
    bench.cluster.writes.clear()
    assert [await bench.run(), await bench.run()] == ["unchanged", "unchanged"]
    assert bench.cluster.writes == []


async def test_write_is_followed_by_a_pass_and_rest_by_the_asked_delay() -> None:
    bench = Bench(full_plan)
    await bench.start()
    await bench.run()
    assert bench.queue.depth == 1
    assert await bench.queue.get() == KEY
    await bench.run()
    bench.queue.done(KEY)
    assert bench.queue.depth == 0
    assert KEY in bench.queue._timers


async def test_quarrel_over_a_field_slows_down() -> None:
    number = iter(range(100))
    bench = Bench(lambda resource, *_: Plan(apply=(config(resource, str(next(number))),)))
    await bench.start()
    for _ in range(5):
        await bench.run()
        assert bench.queue.depth == 1
        assert await bench.queue.get() == KEY
        bench.queue.done(KEY)
    await bench.run()
    assert bench.queue.depth == 0
    assert KEY in bench.queue._timers


async def test_drifted_child_is_repaired() -> None:
    bench = Bench(full_plan)
    resource = await bench.start()
    await bench.run()
    await bench.cluster.apply(config(resource, "bent"))
    found = await bench.cluster.get(CONFIG_MAP, "ns", "m-config")
    assert found is not None
    bench.cache.update(CONFIG_MAP, found)
    assert await bench.run() == "changed"
    found = await bench.cluster.get(CONFIG_MAP, "ns", "m-config")
    assert found is not None
    assert found["data"] == {"v": "1"}


async def test_object_of_someone_else_is_named_and_left_alone() -> None:
    bench = Bench(full_plan)
    await bench.start()
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "m-config", "namespace": "ns"},
        "data": {"v": "theirs"},
    }
    await bench.cluster.create(foreign)
    assert await bench.run() == "error"
    ready = await bench.ready()
    assert (ready["status"], ready["reason"]) == ("False", "OwnedByOther")
    assert "ConfigMap 'm-config' exists and is not made by this operator" in ready["message"]
    assert bench.figures.reasons == ["OwnedByOther"]
    assert bench.figures.shown == {"Ready": "False"}
    found = await bench.cluster.get(CONFIG_MAP, "ns", "m-config")
    assert found is not None
    assert found["data"] == {"v": "theirs"}
    bench.cluster.writes.clear()
    await bench.run()
    assert bench.cluster.writes == [], "the condition is written once"
    assert len(bench.cluster.events) == 1


async def test_child_of_a_former_resource_is_waited_for() -> None:
    bench = Bench(full_plan)
    resource = await bench.start()
    # In the end the collector deletes it; here the uid of another resource keeps it alive.
    other = {**resource, "metadata": {"name": "other", "namespace": "ns"}}
    uid = (await bench.cluster.create(other))["metadata"]["uid"]
    former = {**resource, "metadata": {**resource["metadata"], "uid": uid}}
    made = await bench.cluster.create(config(former))
    bench.cache.update(CONFIG_MAP, made)
    assert await bench.run() == "conflict"
    assert bench.figures.reasons == ["Conflict"]
    assert (await bench.live()).get("status", {}).get("conditions") in (None, [])


async def test_child_that_lost_its_labels_is_still_ours() -> None:
    bench = Bench(full_plan)
    resource = await bench.start()
    bare = config(resource)
    bare["metadata"]["labels"] = {}
    await bench.cluster.create(bare)
    assert await bench.run() == "changed"
    found = await bench.cluster.get(CONFIG_MAP, "ns", "m-config")
    assert found is not None
    assert found["metadata"]["labels"]["inferscale.dev/owner"] == "m"


async def test_refused_object_shows_in_ready_and_is_tried_again() -> None:
    bench = Bench(full_plan)
    await bench.start()
    bench.cluster.errors["apply"] = InvalidError("spec.x: must be 1")
    assert await bench.run() == "error"
    assert (await bench.ready())["message"] == "spec.x: must be 1"
    assert KEY in bench.queue._timers
    assert await bench.run() == "changed"
    assert (await bench.live())["status"] == {"conditions": [], "tier": "disk"}


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (ConflictError("changed"), "conflict"),
        (UnavailableError("down", 9.0), "error"),
    ],
)
async def test_passing_failure_shows_in_no_condition(error: Exception, result: str) -> None:
    bench = Bench(full_plan)
    await bench.start()
    bench.cluster.errors["apply"] = error
    assert await bench.run() == result
    assert "status" not in bench.cluster.writes
    assert KEY in bench.queue._timers


async def test_fault_of_the_operator_is_logged_without_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: Any) -> Plan:
        raise KeyError("a fact about someone")

    bench = Bench(broken)
    await bench.start()
    assert await bench.run() == "error"
    assert bench.figures.reasons == ["KeyError"]
    assert "test_reconciler.py" in caplog.text
    assert "a fact about someone" not in caplog.text


async def test_lost_lease_ends_the_process() -> None:
    bench = Bench(full_plan)
    await bench.start()
    bench.cluster.errors["finalizer"] = LeaseLostError("lost")
    with pytest.raises(LeaseLostError):
        await bench.run()


async def test_resource_that_is_gone_leaves_nothing_behind() -> None:
    bench = Bench(full_plan)
    bench.queue.add_after(KEY, 100)
    assert await bench.run() == "gone"
    assert bench.figures.ended
    assert not bench.queue._timers


async def test_create_once_takes_an_object_whose_answer_was_lost() -> None:
    bench = Bench(lambda resource, *_: Plan(create=(config(resource),)))
    resource = await bench.start()
    await bench.cluster.create(config(resource))
    assert await bench.run() == "changed"
    assert bench.cache.has(CONFIG_MAP, "ns", "m-config")
    bench.cluster.writes.clear()
    assert await bench.run() == "unchanged"
    assert bench.cluster.writes == []


async def test_deleted_child_leaves_the_cache_at_once() -> None:
    def plan(resource: Manifest, observed: Observed, defaults: Defaults) -> Plan:
        live = observed.children.get(("ConfigMap", "m-config"))
        refs = () if live is None else (Ref(CONFIG_MAP, "m-config", live["metadata"]["uid"]),)
        return Plan(delete=refs)

    bench = Bench(plan)
    resource = await bench.start()
    bench.cache.update(CONFIG_MAP, await bench.cluster.create(config(resource)))
    bench.cluster.writes.clear()
    assert [await bench.run(), await bench.run()] == ["changed", "unchanged"]
    assert bench.cluster.writes == ["delete"]


async def test_events_are_posted_after_the_status() -> None:
    event = EventRecord("Normal", "Made", "text")
    bench = Bench(lambda *_: Plan(status={"tier": "disk"}, events=(event,)))
    await bench.start()
    bench.cluster.errors["status"] = ConflictError("changed")
    await bench.run()
    assert bench.cluster.events == []
    await bench.run()
    assert len(bench.cluster.events) == 1


async def test_transition_time_of_a_lasting_failure_stays() -> None:
    live: Manifest = {"metadata": {"generation": 2}}
    status, news = failed_status(live, {}, "Invalid", "why", NOW)
    assert news
    assert status["conditions"][0]["lastTransitionTime"] == "2026-01-02T00:00:00Z"
    later = datetime(2026, 1, 3, tzinfo=UTC)
    again, news = failed_status({**live, "status": status}, status, "Invalid", "why", later)
    assert again == status
    assert not news


async def test_pods_are_marked_before_a_smaller_size_is_written_behind_the_status() -> None:
    bench = Bench(lambda *_: Plan())
    live = await bench.start()
    pods = []
    for name in ("a", "b"):
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "ns"},
        }
        pods.append(await bench.cluster.create(manifest))
    bench.cluster.writes.clear()
    plan = Plan(pod_costs={"a": 7, "b": 0}, status={"tier": "disk"}, replicas=1)
    observed = Observed(now=NOW, pods=tuple(pods))
    executor = Executor(bench.cluster, bench.cache, live, observed)
    outcome = await executor.execute(plan)
    # What costs nothing costs as much as an unmarked pod.
    assert bench.cluster.writes == ["annotate", "status", "scale"]
    marked = await bench.cluster.get(POD, "ns", "a")
    assert marked is not None
    assert marked["metadata"]["annotations"] == {"controller.kubernetes.io/pod-deletion-cost": "7"}
    assert (await bench.live())["spec"] == {"serving": {"replicas": 1}}
    assert outcome.children_changed  # the next pass sees the new size at once


@pytest.mark.parametrize("error", [InvalidError("403"), ConflictError("409")])
async def test_pods_that_may_not_be_marked_stop_nothing(error: Exception) -> None:
    bench = Bench(lambda *_: Plan())
    live = await bench.start()
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "ns"}}
    pod = await bench.cluster.create(manifest)
    bench.cluster.errors["annotate"] = error
    executor = Executor(bench.cluster, bench.cache, live, Observed(now=NOW, pods=(pod,)))
    await executor.execute(Plan(pod_costs={"a": 7}, replicas=1))
    assert (await bench.live())["spec"] == {"serving": {"replicas": 1}}
