"""Figures of pods and nodes, over the cluster in memory."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.cluster.cache import ChildCache
from inferscale_operator.cluster.errors import InvalidError, UnavailableError
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.deployment import build_generation
from inferscale_operator.desired.kinds import DEPLOYMENT, NODE, Kind, Manifest
from inferscale_operator.desired.naming import GENERATION, labels
from inferscale_operator.desired.stores import StoreView
from inferscale_operator.handlers.figures import FORGET_SECONDS, NODE_SECONDS, Figures
from inferscale_operator.handlers.observe import observe
from inferscale_operator.local.memory_cluster import MemoryCluster, counted_uids
from inferscale_operator.planner.tiers import ready_pods

pytestmark = pytest.mark.asyncio
NOW = datetime(2026, 1, 2, tzinfo=UTC)
GPU_SPEC = {
    "model": {"id": "m"},
    "memoryStores": [{"name": "s"}],
    "serving": {"resources": {"limits": {"nvidia.com/gpu": 1}}, "nodeSelector": {"pool": "gpu"}},
}


def model(spec: dict[str, Any] | None = None) -> Manifest:
    return {
        "apiVersion": "inferscale.dev/v1alpha1",
        "kind": "PersonalizedModel",
        "metadata": {"name": "p", "namespace": "ns", "uid": "owner", "resourceVersion": "1"},
        "spec": GPU_SPEC if spec is None else spec,
    }


def pod(name: str, **status: Any) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": f"uid-{name}",
            "labels": labels(model(), "server") | {GENERATION: "g"},
        },
        "spec": {"containers": []},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            **status,
        },
    }


def node(name: str, memory: str | None, **more: str) -> Manifest:
    found = {"pool": "gpu", **more} | ({"nvidia.com/gpu.memory": memory} if memory else {})
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": found}}


class Told(MemoryCluster):
    """Answers for pods and lists nodes as the test says."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: NOW, uids=counted_uids())
        self.seconds = 0.0
        self.answers: dict[str, Mapping[str, object] | None] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.nodes: list[Manifest] | Exception = []
        self.node_lists: list[Mapping[str, str] | None] = []

    async def ask_pod(self, pod: Manifest, port: str, path: str) -> Mapping[str, object] | None:
        self.asked.append((pod["metadata"]["name"], port, path))
        return self.answers.get(pod["metadata"]["name"])

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        if kind != NODE:
            return await super().list(kind, namespace, labels)
        self.node_lists.append(labels)
        if isinstance(self.nodes, Exception):
            raise self.nodes
        return self.nodes

    def figures(self) -> Figures:
        return Figures(self, clock=lambda: self.seconds)


async def test_ready_servers_are_asked_on_their_own_port() -> None:
    cluster = Told()
    cluster.answers["a"] = {"tiers": {"dram": {}}, "gpu": {}, "version": "not needed"}
    reports, ages = await cluster.figures().reports([pod("a"), pod("b", phase="Pending")])
    assert cluster.asked == [("a", "http", "/inferscale/v1/status")]
    assert reports == {"a": {"tiers": {"dram": {}}, "gpu": {}}}
    assert ages == {"a": 0.0}


async def test_a_pod_that_does_not_answer_keeps_its_last_answer_with_its_age() -> None:
    cluster = Told()
    figures = cluster.figures()
    cluster.answers["a"] = {"tiers": {}}
    await figures.reports([pod("a")])
    cluster.answers["a"] = None
    cluster.seconds = 40.0
    assert await figures.reports([pod("a")]) == ({"a": {"tiers": {}}}, {"a": 40.0})
    cluster.seconds = FORGET_SECONDS + 1
    assert await figures.reports([pod("a")]) == ({}, {})


async def test_an_answer_belongs_to_one_pod_and_not_to_its_name() -> None:
    cluster = Told()
    figures = cluster.figures()
    cluster.answers["a"] = {"tiers": {}}
    await figures.reports([pod("a")])
    cluster.answers.clear()
    again = pod("a")
    again["metadata"]["uid"] = "another"
    assert await figures.reports([again]) == ({}, {})


async def test_the_smallest_gpu_of_the_selected_nodes_counts() -> None:
    cluster = Told()
    cluster.nodes = [node("a", "81559"), node("b", "46068"), node("c", None), node("d", "x")]
    assert await cluster.figures().gpu_memory(model()) == 46068 << 20
    assert cluster.node_lists == [{"pool": "gpu"}]


async def test_nodes_are_listed_once_a_minute() -> None:
    cluster = Told()
    figures = cluster.figures()
    cluster.nodes = [node("a", "1000")]
    await figures.gpu_memory(model())
    cluster.nodes = [node("a", "2000")]
    assert await figures.gpu_memory(model()) == 1000 << 20
    assert len(cluster.node_lists) == 1
    cluster.seconds = NODE_SECONDS + 1
    assert await figures.gpu_memory(model()) == 2000 << 20


@pytest.mark.parametrize(
    "resource",
    [
        model({"model": {"id": "m"}, "memoryStores": [{"name": "s"}]}),
        model({"broken": True}),
        {**model(), "kind": "MemoryStore"},
    ],
)
async def test_nodes_are_not_read_for_others(resource: Manifest) -> None:
    cluster = Told()
    assert await cluster.figures().gpu_memory(resource) is None
    assert cluster.node_lists == []


async def test_without_the_right_to_list_nodes_memory_is_not_known() -> None:
    cluster = Told()
    cluster.nodes = InvalidError("403")
    figures = cluster.figures()
    assert await figures.gpu_memory(model()) is None
    assert await figures.gpu_memory(model()) is None
    assert len(cluster.node_lists) == 1


async def test_a_passing_failure_is_tried_again_and_not_taken_for_an_answer() -> None:
    cluster = Told()
    cluster.nodes = UnavailableError("503")
    figures = cluster.figures()
    with pytest.raises(UnavailableError):
        await figures.gpu_memory(model())
    cluster.nodes = [node("a", "1000")]
    assert await figures.gpu_memory(model()) == 1000 << 20


@pytest.mark.parametrize(("ready", "expected"), [(0, []), (1, ["a"])])
async def test_pods_of_a_complete_deployment_are_looked_at_while_they_serve(
    ready: int, expected: list[str]
) -> None:
    cluster, cache = Told(), ChildCache()
    resource = model()
    await cluster.patch_status(await cluster.create(pod("a")), pod("a")["status"])
    cluster.answers["a"] = {"tiers": {}}
    count = {"replicas": ready, "updatedReplicas": ready, "readyReplicas": ready}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "p-g",
            "namespace": "ns",
            "uid": "d",
            "generation": 1,
            "resourceVersion": "2",
            "labels": labels(resource, "server") | {GENERATION: "g"},
        },
        "spec": {"replicas": ready},
        "status": {"observedGeneration": 1, **count},
    }
    cache.update(DEPLOYMENT, deployment)
    observed = await observe(cluster, cache, resource, NOW, cluster.figures())
    assert list(observed.reports) == expected


async def test_a_store_sees_the_models_that_use_it() -> None:
    cluster = Told()
    made = await cluster.create({**model(), "metadata": {"name": "p", "namespace": "ns"}})
    store = {
        "apiVersion": "inferscale.dev/v1alpha1",
        "kind": "MemoryStore",
        "metadata": {"name": "s", "namespace": "ns", "uid": "u"},
        "spec": {},
    }
    observed = await observe(cluster, ChildCache(), store, NOW, cluster.figures(), ["p", "gone"])
    assert observed.references == {("PersonalizedModel", "p"): made}


async def test_what_is_asked_for_is_what_pods_carry() -> None:
    """Labels and port of the builders are those that are looked for here."""
    spec = PersonalizedModelSpec.model_validate(GPU_SPEC)
    facts = {"model": {"id": "m"}, "source": {"configMap": {"name": "f"}}}
    store = StoreView("s", MemoryStoreSpec.model_validate(facts), "a" * 64)
    built = build_generation(model(), spec, [store], Defaults("image"), "g", None)
    template = built[1]["spec"]["template"]
    real = pod("a")
    real["metadata"]["labels"] = template["metadata"]["labels"]
    assert ready_pods([real], "g") == [real]
    [port] = template["spec"]["containers"][0]["ports"]
    assert port["name"] == "http"
