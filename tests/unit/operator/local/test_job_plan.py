from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from inferscale_operator.cluster.errors import ClusterError
from inferscale_operator.desired.kinds import JOB, POD
from inferscale_operator.local.controllers import JobController
from inferscale_operator.local.job_plan import INDEX, finished, index_of
from inferscale_operator.local.memory_cluster import MemoryCluster, counted_uids

pytestmark = pytest.mark.asyncio

IGNORE_DISRUPTION = {
    "rules": [
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }
    ]
}


class World:
    """A Job controller over a cluster in memory; the test plays the executor."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.cluster = MemoryCluster(clock=lambda: self.now, uids=counted_uids())
        self.controller = JobController(self.cluster, clock=lambda: self.now)

    async def start(self, **spec: Any) -> None:
        template = {"spec": {"containers": [{"name": "main"}], "restartPolicy": "Never"}}
        size = spec.pop("size", 1)
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "j", "namespace": "ns"},
            "spec": {
                "completionMode": "Indexed",
                "completions": size,
                "parallelism": size,
                "backoffLimit": 0,
                "template": template,
                **spec,
            },
        }
        await self.cluster.create(job)
        await self.controller.sync()

    async def job(self) -> dict[str, Any]:
        found = await self.cluster.get(JOB, "ns", "j")
        assert found is not None
        return found

    async def pods(self) -> list[dict[str, Any]]:
        return await self.cluster.list(POD, "ns")

    async def pod(self, index: int) -> dict[str, Any]:
        alive = [pod for pod in await self.pods() if index_of(pod) == index]
        return next(pod for pod in alive if pod.get("status", {}).get("phase") != "Failed")

    async def end(self, index: int, code: int, **status: Any) -> None:
        finished_at = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        state = {"terminated": {"exitCode": code, "finishedAt": finished_at}}
        phase = "Failed" if code else "Succeeded"
        content = {"phase": phase, "containerStatuses": [{"name": "main", "state": state}]}
        await self.cluster.patch_status(await self.pod(index), content | status)
        await self.controller.sync()

    async def ended(self) -> tuple[str, str]:
        condition = finished(await self.job())
        assert condition is not None
        return condition["type"], condition["reason"]


async def test_one_pod_for_each_index() -> None:
    world = World()
    await world.start(size=3)
    await world.controller.sync()
    pods = await world.pods()
    assert [pod["metadata"]["annotations"][INDEX] for pod in pods] == ["0", "1", "2"]
    assert [pod["metadata"]["name"].split("-")[1] for pod in pods] == ["0", "1", "2"]
    env = pods[1]["spec"]["containers"][0]["env"]
    assert env[0]["name"] == "JOB_COMPLETION_INDEX"
    await world.controller.sync()
    assert (await world.job())["status"]["active"] == 3


async def test_complete_when_every_index_has_succeeded() -> None:
    world = World()
    await world.start(size=4)
    for index in (0, 1, 3):
        await world.end(index, 0)
    status = (await world.job())["status"]
    assert status["completedIndexes"] == "0-1,3"
    assert finished(await world.job()) is None
    await world.end(2, 0)
    assert await world.ended() == ("Complete", "CompletionsReached")
    status = (await world.job())["status"]
    assert (status["succeeded"], status["active"], status["completedIndexes"]) == (4, 0, "0-3")
    assert status["completionTime"]


async def test_an_index_that_has_succeeded_is_not_run_again_when_its_pod_is_gone() -> None:
    world = World()
    await world.start(size=2)
    await world.end(0, 0)
    done = next(pod for pod in await world.pods() if index_of(pod) == 0)
    await world.cluster.delete(POD, "ns", done["metadata"]["name"], done["metadata"]["uid"])
    await world.controller.sync()
    assert [index_of(pod) for pod in await world.pods()] == [1]


async def test_parallelism_bounds_what_runs_at_once() -> None:
    world = World()
    await world.start(size=3, parallelism=1)
    assert [index_of(pod) for pod in await world.pods()] == [0]
    await world.end(0, 0)
    assert [index_of(pod) for pod in await world.pods()] == [0, 1]


async def test_a_failure_ends_the_job_and_its_other_pods_and_the_failed_pod_stays() -> None:
    world = World()
    await world.start(size=2)
    await world.end(1, 7)
    await world.controller.sync()
    assert await world.ended() == ("Failed", "BackoffLimitExceeded")
    pods = await world.pods()
    assert [index_of(pod) for pod in pods] == [1]
    assert pods[0]["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 7
    assert (await world.job())["status"]["failed"] == 1


async def test_the_job_has_failed_only_when_nothing_runs_any_more() -> None:
    world = World()
    await world.start(size=2)
    other = await world.cluster.set_finalizer(await world.pod(0), "executor", present=True)
    await world.end(1, 1)
    await world.controller.sync()
    assert finished(await world.job()) is None
    assert (await world.job())["status"]["terminating"] == 1
    other = await world.pod(0)
    await world.cluster.set_finalizer(other, "executor", present=False)
    await world.controller.sync()
    assert await world.ended() == ("Failed", "BackoffLimitExceeded")


async def test_a_disrupted_pod_is_replaced_and_not_counted() -> None:
    world = World()
    await world.start(podFailurePolicy=IGNORE_DISRUPTION)
    first = (await world.pod(0))["metadata"]["name"]
    conditions = [{"type": "DisruptionTarget", "status": "True"}]
    await world.end(0, 143, conditions=conditions)
    await world.controller.sync()
    second = (await world.pod(0))["metadata"]["name"]
    assert second != first
    assert (await world.job())["status"]["failed"] == 0
    await world.end(0, 0)
    assert await world.ended() == ("Complete", "CompletionsReached")


async def test_exit_codes_may_fail_the_job_at_once() -> None:
    world = World()
    rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    await world.start(backoffLimit=5, podFailurePolicy={"rules": [rule]})
    await world.end(0, 2)
    await world.controller.sync()
    assert await world.ended() == ("Failed", "PodFailurePolicy")


async def test_retries_are_backed_off() -> None:
    world = World()
    await world.start(backoffLimit=2)
    await world.end(0, 1)
    assert len(await world.pods()) == 1
    world.now += timedelta(seconds=10)
    await world.controller.sync()
    assert len(await world.pods()) == 2
    await world.end(0, 1)
    world.now += timedelta(seconds=19)
    await world.controller.sync()
    assert len(await world.pods()) == 2
    world.now += timedelta(seconds=1)
    await world.controller.sync()
    assert len(await world.pods()) == 3
    await world.end(0, 1)
    await world.controller.sync()
    assert await world.ended() == ("Failed", "BackoffLimitExceeded")


async def test_active_deadline() -> None:
    world = World()
    await world.start(activeDeadlineSeconds=60)
    world.now += timedelta(seconds=59)
    await world.controller.sync()
    assert len(await world.pods()) == 1
    world.now += timedelta(seconds=1)
    await world.controller.sync()
    await world.controller.sync()
    assert await world.pods() == []
    assert await world.ended() == ("Failed", "DeadlineExceeded")


async def test_time_to_live() -> None:
    world = World()
    await world.start(ttlSecondsAfterFinished=300)
    await world.end(0, 0)
    world.now += timedelta(seconds=299)
    await world.controller.sync()
    assert await world.job()
    world.now += timedelta(seconds=1)
    await world.controller.sync()
    assert await world.cluster.list(JOB) == []
    assert await world.pods() == []


async def test_a_finished_job_is_not_written_again() -> None:
    world = World()
    await world.start()
    await world.end(0, 0)
    before = await world.job()
    world.now += timedelta(hours=1)
    await world.controller.sync()
    assert await world.job() == before


async def test_one_broken_job_does_not_hold_the_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    await world.start()
    other = await world.job()
    other["metadata"] = {"name": "a", "namespace": "ns"}
    await world.cluster.create(other)
    real = world.cluster.patch_status

    async def patch_status(live: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
        if live["metadata"]["name"] == "a":
            raise ClusterError("refused")
        return await real(live, status)

    monkeypatch.setattr(world.cluster, "patch_status", patch_status)
    await world.end(0, 0)
    assert await world.ended() == ("Complete", "CompletionsReached")
