"""An operator that is killed at any write, before or after it took effect, converges afterwards."""

from __future__ import annotations

import asyncio
import copy
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from inferscale_operator.cluster.cache import ChildCache, OwnerKey
from inferscale_operator.desired.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    JOB,
    MEMORY_STORE,
    PERSONALIZED_MODEL,
    POD,
    Manifest,
)
from inferscale_operator.handlers.reconciler import Reconciler
from inferscale_operator.handlers.work_queue import WorkQueue
from inferscale_operator.local.memory_cluster import MemoryCluster, counted_uids
from inferscale_operator.planner import memorystore, personalizedmodel
from inferscale_operator.planner.plan import Defaults

NOW = datetime(2026, 1, 2, tzinfo=UTC)
DEFAULTS = Defaults(runtime_image="image")
PLANS = {"MemoryStore": memorystore.plan, "PersonalizedModel": personalizedmodel.plan}
STORE: OwnerKey = ("MemoryStore", "ns", "maya")
MODEL: OwnerKey = ("PersonalizedModel", "ns", "chat")


class Killed(BaseException):
    """The process ends here; no handler of the operator may catch it."""


class Mortal(MemoryCluster):
    """Dies at the n-th write.

    Args:
        last: Number of the write, from 0; None never dies.
        done: Whether that write still takes effect.
    """

    def __init__(self, last: int | None, *, done: bool) -> None:
        super().__init__(clock=lambda: NOW, uids=counted_uids())
        self.last, self.done, self.writes, self.acting = last, done, 0, False

    async def _counted(self, name: str, *args: Any, **kwargs: Any) -> Any:
        call = getattr(super(), name)
        mine = self.acting and self.writes == self.last
        self.writes += int(self.acting)
        if mine and not self.done:
            raise Killed
        result = await call(*args, **kwargs)
        if mine:
            raise Killed
        return result

    async def create(self, manifest: Manifest) -> Manifest:
        return dict(await self._counted("create", manifest))

    async def apply(self, manifest: Manifest, **kwargs: Any) -> Manifest:
        return dict(await self._counted("apply", manifest, **kwargs))

    async def delete(self, *args: Any, **kwargs: Any) -> None:
        await self._counted("delete", *args, **kwargs)

    async def patch_status(self, *args: Any, **kwargs: Any) -> Manifest:
        return dict(await self._counted("patch_status", *args, **kwargs))

    async def set_finalizer(self, *args: Any, **kwargs: Any) -> Manifest:
        return dict(await self._counted("set_finalizer", *args, **kwargs))


class Nobody:
    """Figures that nobody reads."""

    def reconciled(self, *_: Any) -> None: ...
    def failed(self, *_: Any) -> None: ...
    def conditions(self, *_: Any) -> None: ...
    def gone(self, *_: Any) -> None: ...


async def _operator(cluster: Mortal) -> Reconciler:
    """A fresh process: what it knows it has listed."""
    cache = ChildCache()
    for kind in CHILD_KINDS:
        for item in await cluster.list(kind):
            cache.update(kind, item)
    return Reconciler(
        cluster, cache, WorkQueue(), PLANS, DEFAULTS, Nobody(), lambda _: None, lambda: NOW
    )


async def _begin(cluster: Mortal) -> None:
    model = {"id": "builtin:smollm2-135m", "dtype": "float32"}
    for kind, name, spec in (
        ("MemoryStore", "maya", {"model": model, "source": {"configMap": {"name": "facts"}}}),
        ("PersonalizedModel", "chat", {"model": model, "memoryStores": [{"name": "maya"}]}),
    ):
        await cluster.create(
            {
                "apiVersion": "inferscale.dev/v1alpha1",
                "kind": kind,
                "metadata": {"name": name, "namespace": "ns"},
                "spec": spec,
            }
        )
    await cluster.create(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "facts", "namespace": "ns"},
            "data": {"facts.jsonl": "{}"},
        }
    )


async def _controllers(cluster: Mortal) -> None:
    """Jobs end well and Deployments come up."""
    cluster.acting = False
    for job in await cluster.list(JOB):
        if job.get("status"):
            continue
        erases = "erase" in job["metadata"]["name"]
        report: dict[str, Any] = {"fingerprint": "a" * 64, "users": 1, "facts": 2, "store_bytes": 3}
        report = {"files": 1, "bytes": 2} if erases else report
        pod = await cluster.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{job['metadata']['name']}-0",
                    "namespace": "ns",
                    "labels": {
                        **job["spec"]["template"]["metadata"]["labels"],
                        "batch.kubernetes.io/job-name": job["metadata"]["name"],
                    },
                    "ownerReferences": [{"uid": job["metadata"]["uid"], "controller": True}],
                },
                "spec": {},
            }
        )
        ended = {"exitCode": 0, "message": json.dumps(report)}
        containers = [{"state": {"terminated": ended}}]
        await cluster.patch_status(pod, {"phase": "Succeeded", "containerStatuses": containers})
        await cluster.patch_status(
            job, {"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 1}
        )
    for live in await cluster.list(next(k for k in CHILD_KINDS if k.kind == "Deployment")):
        wanted = live["spec"]["replicas"]
        status = dict.fromkeys(
            ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), wanted
        )
        status["observedGeneration"] = live["metadata"]["generation"]
        if live.get("status") != status:
            await cluster.patch_status(live, status)


async def _live(cluster: Mortal) -> int:
    """Lives through births, a new spec and a deletion; how many writes the operator made."""
    operator = await _operator(cluster)

    async def settle() -> None:
        nonlocal operator
        for _ in range(14):
            for key in (STORE, MODEL):
                cluster.acting = True
                try:
                    await operator.reconcile(key)
                except Killed:
                    cluster.last = None
                    cluster.acting = False
                    operator = await _operator(cluster)
            await _controllers(cluster)
            # What its watches tell a process.
            operator = await _operator(cluster)

    await _begin(cluster)
    await settle()
    store = await cluster.get(MEMORY_STORE, "ns", "maya")
    assert store is not None
    changed = copy.deepcopy(store)
    changed["spec"]["encoding"] = {"policy": "none"}
    cluster.acting = False
    changed.pop("status")
    for field in ("resourceVersion", "uid", "generation", "creationTimestamp", "finalizers"):
        changed["metadata"].pop(field, None)
    await cluster.apply(changed, manager="person")
    await settle()
    return cluster.writes


async def _final(cluster: Mortal) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in (*CHILD_KINDS, MEMORY_STORE, PERSONALIZED_MODEL):
        for item in await cluster.list(kind):
            name = f"{kind.kind}/{item['metadata']['name']}"
            ready = [
                c for c in item.get("status", {}).get("conditions", []) if c["type"] == "Ready"
            ]
            found[name] = [(c["status"], c["observedGeneration"]) for c in ready]
    return found


async def _gone(cluster: Mortal) -> None:
    """Deletes both resources and checks that nothing is left."""
    operator = await _operator(cluster)
    for kind, name in ((PERSONALIZED_MODEL, "chat"), (MEMORY_STORE, "maya")):
        live = await cluster.get(kind, "ns", name)
        assert live is not None
        cluster.acting = False
        await cluster.delete(kind, "ns", name, live["metadata"]["uid"])
    for _ in range(8):
        cluster.acting = True
        try:
            await operator.reconcile(STORE)
        except Killed:
            cluster.last = None
        await _controllers(cluster)
        operator = await _operator(cluster)
    assert await cluster.get(MEMORY_STORE, "ns", "maya") is None
    left = [item for kind in (*CHILD_KINDS, POD) for item in await cluster.list(kind)]
    assert [item["metadata"]["name"] for item in left] == ["facts"]


def _undisturbed() -> tuple[int, int, dict[str, Any]]:
    async def run() -> tuple[int, int, dict[str, Any]]:
        cluster = Mortal(None, done=True)
        living = await _live(cluster)
        final = await _final(cluster)
        await _gone(cluster)
        return living, cluster.writes, final

    return asyncio.run(run())


LIVING, ALL, FINAL = _undisturbed()


def test_the_undisturbed_life_is_worth_comparing() -> None:
    assert LIVING > 20
    assert FINAL["MemoryStore/maya"] == [("True", 2)]
    assert FINAL["PersonalizedModel/chat"] == [("True", 1)]
    assert len([name for name in FINAL if name.startswith("Deployment/")]) == 1
    assert not [name for name in FINAL if name.startswith(f"{CONFIG_MAP.kind}/maya-encode")]


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("last", range(ALL))
def test_killed_at_a_write(last: int, done: bool) -> None:
    async def run() -> None:
        cluster = Mortal(last, done=done)
        await _live(cluster)
        assert await _final(cluster) == FINAL
        await _gone(cluster)

    asyncio.run(run())
