from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from inferscale_operator.desired.kinds import DEPLOYMENT, POD
from inferscale_operator.local.controllers import DeploymentController
from inferscale_operator.local.memory_cluster import MemoryCluster, counted_uids

pytestmark = pytest.mark.asyncio


class World:
    """A Deployment controller over a cluster in memory; the test plays the executor."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.cluster = MemoryCluster(clock=lambda: self.now, uids=counted_uids())
        numbers = itertools.count()
        self.controller = DeploymentController(
            self.cluster, lambda: self.now, lambda: str(next(numbers))
        )
        self.spec: dict[str, Any] = {}

    async def apply(self, image: str = "one", **spec: Any) -> None:
        self.spec = {
            "replicas": 1,
            "progressDeadlineSeconds": 600,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            **self.spec,
            **spec,
            "template": {
                "metadata": {"labels": {"app": "d"}},
                "spec": {"containers": [{"name": "main", "image": image}]},
            },
        }
        deployment = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "d", "namespace": "ns"},
            "spec": self.spec,
        }
        await self.cluster.apply(deployment)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            self.now += timedelta(seconds=1)
            await self.controller.sync()

    async def images(self) -> list[str]:
        pods = await self.cluster.list(POD, "ns")
        return sorted(pod["spec"]["containers"][0]["image"] for pod in pods)

    async def ready(self, image: str, *, ready: bool = True) -> None:
        """The first pod of an image becomes ready."""
        status = {"type": "Ready", "status": str(ready)}
        for pod in await self.cluster.list(POD, "ns"):
            same = pod["spec"]["containers"][0]["image"] == image
            if same and pod.get("status", {}).get("conditions") != [status]:
                await self.cluster.patch_status(pod, {"phase": "Running", "conditions": [status]})
                break
        await self.settle()

    async def status(self) -> dict[str, Any]:
        live = await self.cluster.get(DEPLOYMENT, "ns", "d")
        assert live is not None
        found: dict[str, Any] = live["status"]
        return found

    async def condition(self, kind: str) -> tuple[str, str]:
        conditions = (await self.status())["conditions"]
        return next((c["status"], c["reason"]) for c in conditions if c["type"] == kind)


async def test_pods_come_up() -> None:
    world = World()
    await world.apply(replicas=2)
    assert await world.images() == ["one", "one"]
    assert await world.condition("Available") == ("False", "MinimumReplicasUnavailable")
    assert await world.condition("Progressing") == ("True", "ReplicaSetUpdated")
    await world.ready("one")
    await world.ready("one")
    assert await world.condition("Available") == ("True", "MinimumReplicasAvailable")
    assert await world.condition("Progressing") == ("True", "NewReplicaSetAvailable")
    status = await world.status()
    counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
    assert [status[key] for key in counts] == [2, 2, 2, 2]
    assert status["observedGeneration"] == 1


async def test_a_rolling_update_never_goes_below_the_wanted_number() -> None:
    world = World()
    await world.apply(replicas=2)
    await world.ready("one")
    await world.ready("one")
    await world.apply("two")
    assert await world.images() == ["one", "one", "two"]
    status = await world.status()
    assert (status["observedGeneration"], status["updatedReplicas"]) == (2, 1)
    await world.ready("two")
    assert await world.images() == ["one", "two", "two"]
    await world.ready("two")
    assert await world.images() == ["two", "two"]
    assert await world.condition("Available") == ("True", "MinimumReplicasAvailable")


async def test_a_revert_keeps_the_serving_pod() -> None:
    world = World()
    await world.apply()
    await world.ready("one")
    serving = (await world.cluster.list(POD))[0]["metadata"]["name"]
    await world.apply("two")
    await world.apply("one")
    assert [pod["metadata"]["name"] for pod in await world.cluster.list(POD)] == [serving]


async def test_old_pods_that_were_never_ready_go_at_once() -> None:
    world = World()
    await world.apply()
    await world.apply("two")
    assert await world.images() == ["two"]


async def test_scaling_down_keeps_ready_pods() -> None:
    world = World()
    await world.apply(replicas=3)
    await world.ready("one")
    kept = next(p for p in await world.cluster.list(POD) if p.get("status"))["metadata"]["name"]
    await world.apply(replicas=1)
    assert [pod["metadata"]["name"] for pod in await world.cluster.list(POD)] == [kept]
    await world.apply(replicas=0)
    assert await world.images() == []


async def test_recreate_waits_until_old_pods_are_gone() -> None:
    world = World()
    await world.apply(strategy={"type": "Recreate"})
    old = await world.cluster.set_finalizer((await world.cluster.list(POD))[0], "x", present=True)
    await world.apply("two")
    assert await world.images() == ["one"]
    old = (await world.cluster.list(POD))[0]
    await world.cluster.set_finalizer(old, "x", present=False)
    await world.settle()
    assert await world.images() == ["two"]


async def test_a_failed_pod_is_replaced() -> None:
    world = World()
    await world.apply()
    pod = (await world.cluster.list(POD))[0]
    await world.cluster.patch_status(pod, {"phase": "Failed"})
    await world.settle()
    pods = await world.cluster.list(POD)
    assert len(pods) == 1
    assert pods[0]["metadata"]["uid"] != pod["metadata"]["uid"]


async def test_a_stuck_update_is_told() -> None:
    world = World()
    await world.apply()
    world.now += timedelta(seconds=601)
    await world.settle()
    assert await world.condition("Progressing") == ("False", "ProgressDeadlineExceeded")


async def test_nothing_is_written_when_nothing_changes() -> None:
    world = World()
    await world.apply()
    await world.ready("one")
    queue = world.cluster.subscribe()
    await world.settle()
    assert queue.empty()


@pytest.mark.parametrize(("surge", "expected"), [("25%", 5), ("1%", 5), (2, 6)])
async def test_amounts_may_be_percentages(surge: Any, expected: int) -> None:
    world = World()
    rolling = {"maxSurge": surge, "maxUnavailable": 0}
    await world.apply(replicas=4, strategy={"type": "RollingUpdate", "rollingUpdate": rolling})
    for _ in range(4):
        await world.ready("one")
    await world.apply("two")
    assert len(await world.images()) == expected


async def test_a_smaller_deployment_loses_the_pods_that_cost_least() -> None:
    world = World()
    await world.apply(replicas=3)
    for _ in range(3):
        await world.ready("one")
    first, second, third = await world.cluster.list(POD, "ns")
    for pod, cost in ((first, "2"), (second, "0"), (third, "5")):
        await world.cluster.annotate(pod, "controller.kubernetes.io/pod-deletion-cost", cost)
    await world.apply(replicas=1)
    [left] = await world.cluster.list(POD, "ns")
    assert left["metadata"]["name"] == third["metadata"]["name"]
