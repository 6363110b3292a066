"""What pods say about the canary becomes status and conditions, and a quiet figure no write."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from planner_world import MODEL_SPEC, STORE_SPEC, World

from inferscale_operator.api.strict import find_problems
from inferscale_operator.planner.canary import STEP, StoreCanary, read_canaries, worst_canaries
from inferscale_runtime.config import CanaryConfig
from inferscale_runtime.server.canary import Canary
from inferscale_runtime.server.canary_figures import Sample

STORE, MODEL = ("MemoryStore", "a"), ("PersonalizedModel", "chat")


@pytest.fixture
def world() -> World:
    """A model that serves a store with two pods."""
    world = World()
    world.config_map("facts", {"facts.jsonl": "{}"})
    world.add(*STORE, STORE_SPEC)
    world.add(*MODEL, {**MODEL_SPEC, "memoryStores": [{"name": "a"}]})
    world.settle()
    for job in world.active_jobs():
        world.finish(job, {"fingerprint": "f" * 64, "users": 1, "facts": 1, "store_bytes": 310})
    world.settle()
    world.roll_out_all()
    world.settle()
    return world


def told(state: str, kl: float, top1: float = 0.9, store: str = "a") -> dict[str, Any]:
    canary = {"state": state, "kl": kl, "top1_agreement": top1, "samples": 9}
    return {"stores": [{"name": store, "canary": canary}]}


def tell(world: World, *documents: dict[str, Any]) -> None:
    """What the ready pods of the serving generation say."""
    world.run_servers(*({"a": 1.0} for _ in documents))
    for name, document in zip(sorted(world.reports), documents, strict=True):
        world.reports[name] |= document
    world.settle()


def test_before_a_verdict_there_is_no_condition(world: World) -> None:
    tell(world, told("unknown", 0.0))
    for resource in (world.resources[MODEL], world.resources[STORE]):
        types = [condition["type"] for condition in resource["status"]["conditions"]]
        assert "Degraded" not in types
    assert "canary" not in world.resources[MODEL]["status"]


def test_a_store_that_is_close_to_text(world: World) -> None:
    tell(world, told("ok", 0.0712, 0.9049))
    status = world.resources[MODEL]["status"]
    assert status["canary"] == [
        {"name": "a", "state": "ok", "kl": 0.07, "top1Agreement": 0.9, "samples": 9}
    ]
    assert not find_problems(world.resources[MODEL])
    for key in (MODEL, STORE):
        condition = world.condition(*key, "Degraded")
        assert (condition["status"], condition["reason"]) == ("False", "CloseToText")


def test_one_bad_pod_degrades_the_store_with_its_figure(world: World) -> None:
    tell(world, told("ok", 0.9), told("degraded", 0.62, 0.55))
    for key in (MODEL, STORE):
        condition = world.condition(*key, "Degraded")
        assert (condition["status"], condition["reason"]) == ("True", "FarFromText")
        assert "KL 0.62, top-1 agreement 0.55 over 9 prompts" in condition["message"]
        assert world.condition(*key)["status"] == "True", "it is served, as text"
    assert "model 'chat'" in world.condition(*STORE, "Degraded")["message"]
    warnings = [event for event in world.events if event.reason == "FarFromText"]
    assert [event.type for event in warnings] == ["Warning", "Warning"], "one for each resource"
    tell(world, told("ok", 0.1), told("ok", 0.1))
    assert world.condition(*STORE, "Degraded")["status"] == "False"


def test_a_figure_that_hardly_moves_writes_nothing(world: World) -> None:
    tell(world, told("ok", 0.2))
    before = world.writes
    tell(world, told("ok", 0.2 + 0.8 * STEP))
    tell(world, told("ok", 0.2 - 0.8 * STEP))
    assert world.writes == before
    tell(world, told("ok", 0.2 + 1.2 * STEP))
    assert world.resources[MODEL]["status"]["canary"][0]["kl"] == 0.26


def test_stores_of_others_are_left_out(world: World) -> None:
    tell(world, told("degraded", 2.0, store="b"))
    assert "canary" not in world.resources[MODEL]["status"]


def test_what_the_server_really_says_is_read() -> None:
    service: Any = SimpleNamespace(distrusted=set())
    server = Canary(service, None, CanaryConfig(start_samples=1, kl_limit=0.1))
    opened: Any = SimpleNamespace(entry=SimpleNamespace(name="a"))
    assert read_canaries({"stores": [{"name": "a", "canary": server.status("a")}]}) == {}
    server._take(opened, Sample(4.0, 6, 8), "start")
    document = json.loads(json.dumps({"stores": [{"name": "a", "canary": server.status("a")}]}))
    assert read_canaries(document) == {"a": StoreCanary("degraded", 0.5, 0.75, 1)}


@pytest.mark.parametrize(
    "stores",
    [
        None,
        {},
        [None, {"name": "a"}],
        [{"name": "a", "canary": None}],
        [{"name": "a", "canary": {"state": "odd", "kl": 1, "top1_agreement": 1}}],
        [{"name": "a", "canary": {"state": "ok", "kl": "1", "top1_agreement": 1}}],
        [{"name": 3, "canary": {"state": "ok", "kl": 1, "top1_agreement": 1}}],
        [{"name": "a", "canary": {"state": "ok", "kl": -1, "top1_agreement": True}}],
    ],
)
def test_what_is_missing_or_wrong_is_no_verdict(stores: Any) -> None:
    assert worst_canaries([{"stores": stores}]) == {}
