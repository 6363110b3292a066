"""Scaling of a model over its life: sizes, conditions, who gets the traffic, what is remembered."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from planner_world import DEFAULTS, MODEL_SPEC, STORE_SPEC, World

from inferscale_operator.api.strict import find_problems
from inferscale_operator.planner.load import PodLoad

STORE, MODEL = ("MemoryStore", "maya"), ("PersonalizedModel", "chat")
NAMES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "ttft": "vllm:time_to_first_token_seconds",
}
IDLE = PodLoad(0.0, answered=0.0, names=NAMES)
SLEEPY = {"provider": "operator", "maxReplicas": 4, "scaleToZero": {"idleSeconds": 60}}


def serving(**autoscaling: Any) -> World:
    """A model that serves with one replica."""
    world = World()
    world.defaults = replace(DEFAULTS, activator_image="example.invalid/operator:1")
    world.config_map("facts", {"facts.jsonl": "{}"})
    world.add(*STORE, STORE_SPEC)
    world.add(*MODEL, {**MODEL_SPEC, "autoscaling": autoscaling})
    for _ in range(3):
        world.settle()
        world.finish_all_jobs()
        world.roll_out_all()
    world.run_servers({})
    world.tell_load(IDLE)
    world.settle()
    return world


def size(world: World) -> int:
    return int(world.resources[MODEL]["spec"].get("serving", {}).get("replicas", 1))


def deployment(world: World) -> dict[str, Any]:
    [live] = [d for d in world.of("chat", "Deployment") if "activator" not in d["metadata"]["name"]]
    return live


def selected(world: World) -> str:
    [service] = [s for s in world.of("chat", "Service") if s["metadata"]["name"] == "chat"]
    return str(service["spec"]["selector"]["app.kubernetes.io/component"])


def busy(requests: float) -> PodLoad:
    return replace(IDLE, running=requests, answered=1.0)


def look(world: World, seconds: float, *loads: PodLoad, step: float = 10) -> None:
    """Passes of the operator for so long."""
    for _ in range(max(1, int(seconds / step))):
        world.pass_time(step)
        world.tell_load(*loads)
        world.step(*MODEL)


def fall_asleep(world: World) -> None:
    for _ in range(10):
        if size(world) > 0:
            look(world, 10, IDLE)
    assert size(world) == 0


def events(world: World) -> list[str]:
    return [event.reason for event in world.events]


def test_load_makes_it_larger_and_the_deployment_follows() -> None:
    world = serving(provider="operator")
    look(world, 10, busy(20))
    assert size(world) == 3
    assert deployment(world)["spec"]["replicas"] == 1  # the size was written, not the child
    world.settle()
    assert deployment(world)["spec"]["replicas"] == 3
    status = world.resources[MODEL]["status"]["autoscaling"]
    assert "requests 20" in status["reason"]
    assert "Scaled" in events(world)
    assert find_problems(world.resources[MODEL]) == []


def test_a_steady_load_costs_no_write() -> None:
    world = serving(**SLEEPY)
    look(world, 60, busy(8))
    before = world.writes
    look(world, 600, busy(8))
    assert world.writes == before


def test_an_operator_that_starts_anew_goes_on() -> None:
    world = serving(provider="operator")
    look(world, 10, busy(20))
    world.settle()
    world.roll_out_all()
    world.run_servers({}, {}, {})
    look(world, 200, IDLE, IDLE, IDLE)
    # Everything that lasts lies in the resource: here it is read back as JSON.
    world.resources[MODEL] = copy.deepcopy(world.resources[MODEL])
    look(world, 90, IDLE, IDLE, IDLE)
    assert size(world) == 3
    look(world, 30, IDLE, IDLE, IDLE)
    assert size(world) == 1


def test_pods_with_the_fewest_requests_are_to_go_first() -> None:
    world = serving(provider="operator", behavior={"downSeconds": 0})
    look(world, 10, busy(20))
    world.settle()
    world.roll_out_all()
    world.run_servers({}, {}, {})
    world.pass_time(10)
    world.tell_load(busy(5), busy(0), busy(2))
    plan = world.plan(*MODEL)
    assert plan.replicas == 1
    assert sorted(plan.pod_costs.values()) == [0, 2, 5]


def test_the_service_turns_to_the_activator_before_servers_go() -> None:
    world = serving(**SLEEPY)
    assert selected(world) == "server"
    fall_asleep(world)
    world.step(*MODEL)
    assert selected(world) == "activator"
    assert deployment(world)["spec"]["replicas"] == 1  # until the Service was seen to have turned
    world.step(*MODEL)
    assert deployment(world)["spec"]["replicas"] == 0
    world.roll_out_all()
    world.settle()
    condition = world.condition(*MODEL)
    assert condition["status"] == "True"
    assert world.condition(*MODEL, "ServerAvailable")["reason"] == "Asleep"
    assert "FellAsleep" in events(world)


def test_it_serves_again_when_a_server_is_ready() -> None:
    world = serving(**SLEEPY)
    fall_asleep(world)
    world.settle()
    world.roll_out_all()
    world.run_servers()
    world.settle()
    world.scale(world.resources[MODEL], 1)  # the activator wakes it
    world.held = 3
    world.settle()
    assert deployment(world)["spec"]["replicas"] == 1
    assert selected(world) == "activator"
    assert world.condition(*MODEL)["status"] == "False"
    world.roll_out_all()
    world.run_servers({})
    world.held = 0
    look(world, 10, busy(3))
    assert selected(world) == "server"
    world.settle()
    assert world.condition(*MODEL)["status"] == "True"


def test_whoever_writes_0_the_activator_takes_over_first() -> None:
    world = serving(
        provider="keda",
        prometheusAddress="http://prometheus:9090",
        scaleToZero={},
    )
    world.scale(world.resources[MODEL], 0)  # KEDA does
    world.step(*MODEL)
    assert (selected(world), deployment(world)["spec"]["replicas"]) == ("activator", 1)
    world.settle()
    assert deployment(world)["spec"]["replicas"] == 0
    world.held = 5
    look(world, 60)
    assert size(world) == 0  # KEDA's business, and the activator's


@pytest.mark.parametrize("provider", ["hpa", "none"])
def test_other_providers_sizes_are_left_alone(provider: str) -> None:
    world = serving(provider=provider, scaleToZero={"idleSeconds": 100_000})
    world.scale(world.resources[MODEL], 3)
    world.settle()
    world.roll_out_all()
    world.run_servers({}, {}, {})
    look(world, 3600, IDLE, IDLE, IDLE)
    look(world, 3600, busy(100), busy(100), busy(100))
    assert size(world) == 3


def test_without_its_activator_it_does_not_sleep_and_says_so() -> None:
    world = serving(**SLEEPY)
    world.children["chat", ("Deployment", "chat-activator")]["status"] = {}
    look(world, 600, IDLE)
    assert size(world) == 1
    assert world.condition(*MODEL, "ActivatorReady")["status"] == "False"
    assert world.condition(*MODEL)["status"] == "True"
    world.scale(world.resources[MODEL], 0)  # somebody else does not know
    world.settle()
    assert deployment(world)["spec"]["replicas"] == 1
    assert selected(world) == "server"


def test_a_generation_that_comes_up_keeps_the_size() -> None:
    world = serving(provider="operator", behavior={"downSeconds": 0})
    look(world, 10, busy(20))
    world.settle()
    world.roll_out_all()
    world.run_servers({}, {}, {})
    world.settle()
    serving_spec = {**world.resources[MODEL]["spec"]["serving"], "engineArgs": ["--enforce-eager"]}
    world.edit(*MODEL, serving=serving_spec)
    world.settle()
    assert len(world.of("chat", "Deployment")) == 2
    look(world, 600, *[IDLE] * 6)
    assert size(world) == 3


def test_a_sleeping_model_takes_a_new_generation_without_a_server() -> None:
    world = serving(**SLEEPY)
    fall_asleep(world)
    world.settle()
    world.roll_out_all()
    world.run_servers()
    world.settle()
    old = deployment(world)["metadata"]["name"]
    changed = {**world.resources[MODEL]["spec"]["serving"], "engineArgs": ["--enforce-eager"]}
    world.edit(*MODEL, serving=changed)
    for _ in range(3):
        world.step(*MODEL)
        world.roll_out_all()
    world.settle()
    assert deployment(world)["metadata"]["name"] != old
    assert deployment(world)["spec"]["replicas"] == 0
    assert selected(world) == "activator"
    assert world.condition(*MODEL)["status"] == "True"


def test_a_missing_metric_is_named_and_the_size_stays() -> None:
    world = serving(provider="operator", target={"kvCachePercent": 80})
    condition = world.condition(*MODEL, "MetricsAvailable")
    assert (condition["status"], condition["reason"]) == ("False", "MetricMissing")
    assert "vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc" in condition["message"]
    assert "MetricMissing" in events(world)
    look(world, 10, busy(20))
    assert size(world) == 3  # by the signals that are there
    without = replace(busy(0), names={"ttft": "x"})
    world.settle()
    world.roll_out_all()
    world.run_servers({}, {}, {})
    look(world, 3600, without, without, without)
    assert size(world) == 3
    assert "vllm:num_requests_running" in world.condition(*MODEL, "MetricsAvailable")["message"]


def test_metrics_are_unknown_before_a_server_answers_and_known_while_it_sleeps() -> None:
    world = serving(**SLEEPY)
    assert world.condition(*MODEL, "MetricsAvailable")["status"] == "True"
    fall_asleep(world)
    world.settle()
    world.roll_out_all()
    world.run_servers()
    look(world, 60)
    assert world.condition(*MODEL, "MetricsAvailable")["status"] == "True"
    fresh = World()
    fresh.config_map("facts", {"facts.jsonl": "{}"})
    fresh.add(*STORE, STORE_SPEC)
    fresh.add(*MODEL, {**MODEL_SPEC, "autoscaling": {"provider": "operator"}})
    fresh.settle()
    assert fresh.condition(*MODEL, "MetricsAvailable")["status"] == "Unknown"


def test_switched_off_it_leaves_no_child_behind() -> None:
    world = serving(**SLEEPY)
    kinds = {"Role", "RoleBinding"}
    assert kinds <= {kind for (_, (kind, _)) in world.children}
    fall_asleep(world)
    world.settle()
    world.edit(*MODEL, autoscaling={})
    world.settle()
    assert size(world) == 1  # it was put to sleep by a spec that holds no more
    assert not kinds & {kind for (_, (kind, _)) in world.children}
    assert [s["metadata"]["name"] for s in world.of("chat", "Service")] == ["chat"]
    assert selected(world) == "server"
    assert len(world.of("chat", "Deployment")) == 1


@pytest.mark.parametrize(
    "autoscaling",
    [
        {"provider": "operator", "minReplicas": 5, "maxReplicas": 2},
        {"provider": "operator", "minReplicas": 0},
    ],
)
def test_a_wrong_spec_is_said_and_serving_goes_on(autoscaling: dict[str, Any]) -> None:
    world = serving(provider="operator")
    look(world, 10, busy(20))
    world.settle()
    before = deployment(world)["spec"]["replicas"]
    world.edit(*MODEL, autoscaling=autoscaling)
    look(world, 60, IDLE)
    assert world.condition(*MODEL)["reason"] == "InvalidSpec"
    assert "spec.autoscaling" in world.condition(*MODEL)["message"]
    assert "InvalidSpec" in events(world)
    assert deployment(world)["spec"]["replicas"] == before == 3
