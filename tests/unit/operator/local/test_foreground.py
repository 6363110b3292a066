"""Foreground deletion of Jobs in the in-memory cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from inferscale_operator.desired.kinds import JOB, POD
from inferscale_operator.local.memory_cluster import MemoryCluster


def _job() -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "j", "namespace": "n"},
        "spec": {},
    }


def _pod(uid: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "namespace": "n",
            "finalizers": ["test/running"],
            "ownerReferences": [{"uid": uid, "controller": True}],
        },
        "spec": {},
    }


def test_a_job_stays_until_its_pods_are_gone() -> None:
    async def scenario() -> None:
        cluster = MemoryCluster()
        job = await cluster.create(_job())
        pod = await cluster.create(_pod(job["metadata"]["uid"]))
        await cluster.delete(JOB, "n", "j", job["metadata"]["uid"])
        live = await cluster.get(JOB, "n", "j")
        assert live is not None
        assert live["metadata"]["deletionTimestamp"]
        pod = await cluster.get(POD, "n", "p") or pod
        assert pod["metadata"]["deletionTimestamp"]
        await cluster.set_finalizer(pod, "test/running", present=False)
        assert await cluster.get(POD, "n", "p") is None
        assert await cluster.get(JOB, "n", "j") is None

    asyncio.run(scenario())


def test_a_job_without_pods_goes_at_once() -> None:
    async def scenario() -> None:
        cluster = MemoryCluster()
        job = await cluster.create(_job())
        await cluster.delete(JOB, "n", "j", job["metadata"]["uid"])
        assert await cluster.get(JOB, "n", "j") is None

    asyncio.run(scenario())
