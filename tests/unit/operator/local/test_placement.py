"""From answers of pods to plan, statuses and Event: handlers, planner and controllers together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from inferscale_operator.cluster.cache import ChildCache, OwnerKey
from inferscale_operator.desired.kinds import CONFIG_MAP, DEPLOYMENT, POD, Manifest, kind_of
from inferscale_operator.handlers.events import Router
from inferscale_operator.handlers.hearing import Hearing
from inferscale_operator.handlers.reconciler import Reconciler
from inferscale_operator.handlers.work_queue import WorkQueue
from inferscale_operator.local.controllers import DeploymentController, JobController
from inferscale_operator.local.memory_cluster import Change, MemoryCluster
from inferscale_operator.local.up import PLANS
from inferscale_operator.planner.plan import Defaults
from inferscale_runtime.config import TierPlan

pytestmark = pytest.mark.asyncio
REPORT = {"fingerprint": "f" * 64, "users": 1, "facts": 1, "store_bytes": 1000}


class _NoFigures:
    def reconciled(self, key: OwnerKey, result: str, seconds: float) -> None:
        """Nothing."""

    def failed(self, key: OwnerKey, reason: str) -> None:
        raise AssertionError(f"{key}: {reason}")

    def conditions(self, key: OwnerKey, conditions: Mapping[str, str]) -> None:
        """Nothing."""

    def gone(self, key: OwnerKey) -> None:
        """Nothing."""


class Loop:
    """The loop of ``up`` by hand; pods are played."""

    def __init__(self) -> None:
        self.heat: dict[str, float] = {"a": 9.0, "b": 1.0}
        self.asked: list[str] = []
        self.cluster = MemoryCluster(ask=self._answer)
        self.changes: list[Change] = []
        self.queue = WorkQueue()
        cache = ChildCache()
        self.router = Router(cache, self.queue, Hearing())
        self.cluster.watch(self._changed)
        self.reconciler = Reconciler(
            self.cluster,
            cache,
            self.queue,
            PLANS,
            Defaults(runtime_image="image"),
            _NoFigures(),
            self.router.wrote,
            models_of=self.router.models_of,
        )
        self.controllers = (JobController(self.cluster), DeploymentController(self.cluster))

    async def _answer(self, pod: Manifest, port: str, path: str) -> Mapping[str, object] | None:
        if port != "http":
            return None
        self.asked.append(f"{port}{path}")
        stores = {name: {"heat": value} for name, value in self.heat.items()}
        tiers = {"dram": {"slab_bytes": 1040}, "stores": stores}
        return {"tiers": tiers, "gpu": {"up": False, "reason": "no driver"}}

    def _changed(self, change: Change) -> None:
        self.changes.append(change)
        try:
            kind = kind_of(change.object)
        except KeyError:
            return
        self.router.event(kind, change.type, change.object)

    async def create(self, kind: str, name: str, spec: dict[str, Any]) -> None:
        await self.cluster.create(
            {
                "apiVersion": "inferscale.dev/v1alpha1",
                "kind": kind,
                "metadata": {"name": name, "namespace": "ns"},
                "spec": spec,
            }
        )

    async def rest(self) -> int:
        """Lets everything come to rest; how many changes that took."""
        before = len(self.changes)
        for _ in range(30):
            seen = len(self.changes)
            for key in self.router.known:
                await self.reconciler.reconcile(key)
            for controller in self.controllers:
                await controller.sync()
            for pod in await self.cluster.list(POD):
                await self._play(pod)
            if len(self.changes) == seen:
                return seen - before
        raise AssertionError("it does not come to rest")

    async def _play(self, pod: Manifest) -> None:
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "server":
            status: dict[str, Any] = {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
            }
        else:
            ended = {"exitCode": 0, "message": json.dumps(REPORT)}
            status = {
                "phase": "Succeeded",
                "containerStatuses": [{"state": {"terminated": ended}}],
            }
        if pod.get("status") != status:
            await self.cluster.patch_status(pod, status)

    async def statuses(self) -> dict[str, Any]:
        found = {}
        for _, namespace, name in self.router.known:
            for kind in ("MemoryStore", "PersonalizedModel"):
                live = self.cluster._entries.get(("inferscale.dev", kind, namespace, name))
                if live is not None:
                    found[name] = live.live["status"]
        return found

    async def plan(self) -> TierPlan:
        found = await self.cluster.get(CONFIG_MAP, "ns", "chat-plan")
        assert found is not None
        return TierPlan.model_validate_json(found["data"]["plan.json"])


async def test_figures_of_pods_become_a_plan_and_live_tiers() -> None:
    loop = Loop()
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"f.jsonl": "{}"}}
    await loop.cluster.create({**config_map, "metadata": {"name": "facts", "namespace": "ns"}})
    model = {"id": "m"}
    for name in ("a", "b"):
        source = {"configMap": {"name": "facts"}}
        await loop.create("MemoryStore", name, {"model": model, "source": source})
    stores = [{"name": "a"}, {"name": "b"}]
    serving = {"replicas": 2}
    spec = {"model": model, "memoryStores": stores, "serving": serving}
    await loop.create("PersonalizedModel", "chat", spec)
    await loop.rest()

    statuses = await loop.statuses()
    assert set(loop.asked) == {"http/inferscale/v1/status"}
    assert {name: statuses[name]["tier"] for name in ("a", "b")} == {"a": "dram", "b": "disk"}
    assert [item["tier"] for item in statuses["chat"]["placement"]["stores"]] == ["dram", "disk"]
    assert (await loop.plan()).stores["b"].tier == "disk"
    [event] = [posted for posted in loop.cluster.events if posted.event.reason == "Placed"]
    assert (event.kind, event.name) == ("PersonalizedModel", "chat")

    # Figures that change nothing write nothing.
    loop.heat = {"a": 8.0, "b": 1.1}
    assert await loop.rest() == 0

    [deployment] = await loop.cluster.list(DEPLOYMENT)
    loop.heat = {"a": 1.0, "b": 9.0}
    assert await loop.rest() > 0
    statuses = await loop.statuses()
    assert {name: statuses[name]["tier"] for name in ("a", "b")} == {"a": "disk", "b": "dram"}
    [after] = await loop.cluster.list(DEPLOYMENT)
    assert after["metadata"]["generation"] == deployment["metadata"]["generation"]
