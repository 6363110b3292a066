"""The tier plan over the life of a model: what is written, when, and what holds in between."""

from __future__ import annotations

import json
from typing import Any

import pytest
from planner_world import MODEL_SPEC, STORE_SPEC, World

from inferscale_operator.api.strict import find_problems
from inferscale_operator.planner.tiers import MOST_PODS, fastest_tier, live_tiers, ready_pods
from inferscale_runtime.config import TierPlan

HOT, COLD, MODEL = ("MemoryStore", "hot"), ("MemoryStore", "cold"), ("PersonalizedModel", "chat")
PLAN = ("chat", ("ConfigMap", "chat-plan"))


@pytest.fixture
def world() -> World:
    """A model that serves two stores of 310 bytes each from an arena that holds one of them."""
    world = World()
    world.config_map("facts", {"facts.jsonl": "{}"})
    world.add(*HOT, STORE_SPEC)
    world.add(*COLD, STORE_SPEC)
    world.add(*MODEL, {**MODEL_SPEC, "memoryStores": [{"name": "hot"}, {"name": "cold"}]})
    world.settle()
    for job in world.active_jobs():
        world.finish(job, {"fingerprint": "f" * 64, "users": 1, "facts": 1, "store_bytes": 310})
    world.settle()
    world.roll_out_all()
    world.settle()
    return world


def placed(world: World) -> dict[str, str]:
    stores = world.resources[MODEL]["status"]["placement"]["stores"]
    return {store["name"]: store["tier"] for store in stores}


def plan_file(world: World) -> TierPlan:
    return TierPlan.model_validate_json(world.children[PLAN]["data"]["plan.json"])


def placed_events(world: World) -> list[str]:
    return [event.message for event in world.events if event.reason == "Placed"]


def test_without_figures_there_is_no_plan_and_serving_is_ready(world: World) -> None:
    assert PLAN not in world.children
    assert "placement" not in world.resources[MODEL]["status"]
    assert world.condition(*MODEL)["status"] == "True"
    assert world.plan(*MODEL).requeue_seconds == 30


def test_figures_make_a_plan_that_the_pods_can_read(world: World) -> None:
    world.run_servers({"hot": 9.0, "cold": 1.0})
    world.settle()
    assert placed(world) == {"hot": "dram", "cold": "disk"}
    assert plan_file(world).dram_bytes == 320
    assert plan_file(world).stores["cold"].tier == "disk"
    assert world.condition(*MODEL, "MetricsFresh")["status"] == "True"
    [message] = placed_events(world)
    assert "hot -> dram" in message
    assert "cold -> disk" in message


def test_stores_show_the_tier_that_servers_keep_them_in(world: World) -> None:
    world.run_servers({"hot": 9.0, "cold": 1.0})
    world.settle()
    assert [world.resources[key]["status"]["tier"] for key in (HOT, COLD)] == ["dram", "disk"]


def test_the_same_plan_writes_nothing_whatever_the_figures_are(world: World) -> None:
    world.run_servers({"hot": 9.0, "cold": 1.0})
    world.settle()
    before, events = world.writes, len(world.events)
    for number in range(1, 6):
        world.pass_time(30)
        world.run_servers({"hot": 9.0 - number / 7, "cold": 1.0 + number / 7})
        world.settle()
    assert (world.writes, len(world.events)) == (before, events)


def test_a_small_gain_moves_nothing_and_a_large_one_does(world: World) -> None:
    world.run_servers({"hot": 4.0, "cold": 1.0})
    world.settle()
    world.run_servers({"hot": 4.0, "cold": 4.9})
    world.settle()
    assert placed(world) == {"hot": "dram", "cold": "disk"}
    since = world.resources[MODEL]["status"]["placement"]["plannedAt"]
    world.pass_time(60)
    world.run_servers({"hot": 4.0, "cold": 5.1})
    world.settle()
    assert placed(world) == {"hot": "disk", "cold": "dram"}
    assert world.resources[MODEL]["status"]["placement"]["plannedAt"] > since
    assert len(placed_events(world)) == 2


def test_a_plan_is_no_change_of_the_pods(world: World) -> None:
    [before] = [item["spec"] for item in world.of("chat", "Deployment")]
    world.run_servers({"hot": 9.0, "cold": 1.0})
    world.settle()
    world.run_servers({"hot": 1.0, "cold": 9.0})
    world.settle()
    assert [item["spec"] for item in world.of("chat", "Deployment")] == [before]


@pytest.mark.parametrize("what", ["missing", "old", "no arena"])
def test_without_fresh_figures_of_each_pod_the_last_plan_stays(world: World, what: str) -> None:
    world.run_servers({"hot": 9.0, "cold": 1.0}, {"hot": 9.0, "cold": 1.0})
    world.settle()
    plan = world.children[PLAN]["data"]
    world.run_servers({"hot": 0.0, "cold": 50.0}, {"hot": 0.0, "cold": 50.0})
    name = sorted(world.reports)[0]
    if what == "missing":
        del world.reports[name]
    elif what == "old":
        world.report_ages[name] = 61.0
    else:
        world.reports[name]["tiers"] = {}
    world.settle()
    assert world.children[PLAN]["data"] == plan
    fresh = world.condition(*MODEL, "MetricsFresh")
    assert (fresh["status"], fresh["reason"]) == ("False", "Stale")
    assert name in fresh["message"]
    assert world.condition(*MODEL)["status"] == "True", "not part of Ready"
    before = world.writes
    for age in (70.0, 100.0, 900.0):
        if what == "old":
            world.report_ages[name] = age
        world.pass_time(30)
        world.settle()
    assert world.writes == before, "ages are not shown"


def test_a_plan_that_someone_bent_or_deleted_comes_back(world: World) -> None:
    world.run_servers({"hot": 9.0, "cold": 1.0})
    world.settle()
    plan = world.children[PLAN]["data"]
    world.children[PLAN]["data"] = {**plan, "plan.json": "{}"}
    world.settle()
    assert world.children[PLAN]["data"] == plan
    world.children[PLAN]["data"] = {"grants.json": "no JSON"}
    world.settle()
    assert world.children[PLAN]["data"] == plan
    del world.children[PLAN]
    world.settle()
    assert world.children[PLAN]["data"] == plan


def test_a_spec_decides_before_use_does(world: World) -> None:
    world.run_servers({"hot": 9.0, "cold": 1.0})
    world.settle()
    world.edit(*HOT, placement={"tier": "Disk"})
    world.edit(*COLD, placement={"tier": "DRAM", "priority": 5})
    world.settle()
    assert placed(world) == {"hot": "disk", "cold": "dram"}
    assert plan_file(world).stores["hot"].ceiling_bytes == 40
    assert world.resources[COLD]["status"]["tier"] == "dram"


def test_a_store_that_goes_leaves_the_plan(world: World) -> None:
    world.run_servers({"hot": 9.0, "cold": 1.0})
    world.settle()
    world.edit(*MODEL, memoryStores=[{"name": "cold"}])
    world.settle()
    world.roll_out_all()
    world.run_servers({"cold": 1.0})
    world.settle()
    world.settle()
    assert placed(world) == {"cold": "dram"}
    assert world.resources[HOT]["status"]["tier"] == "disk"


def test_the_arena_of_the_running_pods_counts(world: World) -> None:
    gpus = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    world.edit(*MODEL, serving=gpus, tiers={"gpu": {"budget": "1Gi"}})
    world.settle()
    world.roll_out_all()
    world.settle()
    world.run_servers({"hot": 9.0, "cold": 1.0})
    world.settle()
    assert "no GPU figures" in world.condition(*MODEL, "MetricsFresh")["message"]
    world.run_servers({"hot": 9.0, "cold": 1.0}, gpu_free=10 << 30)
    world.settle()
    assert plan_file(world).gpu_bytes == 1 << 30
    assert placed(world) == {"hot": "gpu", "cold": "disk"}, "the arena holds copies of DRAM"
    assert world.resources[HOT]["status"]["tier"] == "gpu"


def test_while_no_pod_is_ready_the_plan_stays_and_nothing_is_live(world: World) -> None:
    world.run_servers({"hot": 9.0, "cold": 1.0})
    world.settle()
    world.run_servers()
    for item in world.of("chat", "Deployment"):
        item["status"]["readyReplicas"] = 0
    world.settle()
    assert PLAN in world.children
    assert world.condition(*MODEL, "MetricsFresh")["reason"] == "NoReadyPod"
    assert world.resources[HOT]["status"]["tier"] == "disk"


def test_statuses_are_what_the_schema_keeps(world: World) -> None:
    world.run_servers({"hot": 9.0, "cold": 1.0})
    world.settle()
    for resource in world.resources.values():
        assert find_problems(resource) == []


def pod(name: str, **changes: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": "server", "inferscale.dev/generation": "g"}
    return {
        "metadata": {"name": name, "labels": labels, **changes.get("metadata", {})},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            **changes.get("status", {}),
        },
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": {"deletionTimestamp": "t"}},
        {"metadata": {"labels": {"inferscale.dev/generation": "g"}}},
        {"metadata": {"labels": {"app.kubernetes.io/component": "server"}}},
        {"status": {"phase": "Pending"}},
        {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
        {"status": {"conditions": None}},
    ],
)
def test_only_ready_pods_of_the_generation_are_asked(changes: dict[str, Any]) -> None:
    found = ready_pods([pod("b"), pod("x", **changes), pod("a")], "g")
    assert [item["metadata"]["name"] for item in found] == ["a", "b"]


def test_a_large_generation_is_asked_in_part() -> None:
    pods = [pod(f"p{number:03}") for number in reversed(range(MOST_PODS + 5))]
    assert [item["metadata"]["name"] for item in ready_pods(pods, "g")][-1] == "p063"


def test_the_fastest_tier_of_all_models_is_shown() -> None:
    def model(tier: str, ready: int = 1) -> dict[str, Any]:
        stores = [{"name": "s", "tier": tier}]
        return {"status": {"readyReplicas": ready, "placement": {"stores": stores}}}

    key = "PersonalizedModel"
    assert fastest_tier("s", {(key, "a"): model("disk"), (key, "b"): model("gpu")}) == "gpu"
    assert fastest_tier("s", {(key, "a"): model("disk"), (key, "b"): model("gpu", 0)}) == "disk"
    assert fastest_tier("t", {(key, "a"): model("gpu")}) is None
    assert fastest_tier("s", {("MemoryStore", "a"): model("gpu")}) is None
    assert live_tiers({}) == {}


def test_the_saved_plan_is_small_and_says_nothing_of_facts(world: World) -> None:
    world.run_servers({"hot": 9.0, "cold": 1.0})
    world.settle()
    saved = json.loads(world.children[PLAN]["data"]["grants.json"])
    assert set(saved) == {"dram_bytes", "gpu_bytes", "stores"}
