from __future__ import annotations

import copy
from typing import Any

import pytest
from planner_world import FINGERPRINT, MODEL_SPEC, STORE_SPEC, World

from inferscale_operator.api.strict import find_problems
from inferscale_operator.desired.naming import GENERATION
from inferscale_operator.planner.load import PodLoad

STORE = ("MemoryStore", "maya")
MODEL = ("PersonalizedModel", "chat")


@pytest.fixture
def world() -> World:
    world = World()
    world.config_map("facts", {"facts.jsonl": "{}"})
    world.add(*STORE, STORE_SPEC)
    world.add(*MODEL, MODEL_SPEC)
    return world


def encode(world: World, fingerprint: str = FINGERPRINT, **more: Any) -> None:
    world.settle()
    report = {"fingerprint": fingerprint, "users": 1, "facts": 3, "store_bytes": 9, **more}
    for job in world.active_jobs():
        world.finish(job, report)
    world.settle()


def serve(world: World) -> None:
    encode(world)
    world.roll_out_all()
    world.settle()


def deployments(world: World) -> list[str]:
    return [item["metadata"]["labels"][GENERATION] for item in world.of("chat", "Deployment")]


def selected(world: World) -> str | None:
    services = world.of("chat", "Service")
    return services[0]["spec"]["selector"][GENERATION] if services else None


def test_it_waits_for_its_store_and_says_so(world: World) -> None:
    world.settle()
    assert not world.of("chat", "Deployment")
    condition = world.condition(*MODEL)
    assert (condition["status"], condition["reason"]) == ("False", "WaitingForEncoding")
    assert "MemoryStore 'maya'" in condition["message"]


def test_it_serves_when_the_store_is_encoded(world: World) -> None:
    encode(world)
    assert len(deployments(world)) == 1
    assert world.condition(*MODEL)["status"] == "False"
    world.roll_out_all()
    world.settle()
    assert world.condition(*MODEL)["status"] == "True"
    assert [selected(world)] == deployments(world)
    status = world.resources[MODEL]["status"]
    assert status["replicas"] == status["readyReplicas"] == 1
    assert status["facts"]["summary"] == "3/3"
    assert status["endpoint"] == "http://chat.team.svc"


def test_nothing_is_written_when_nothing_changed(world: World) -> None:
    serve(world)
    before = world.writes
    for _ in range(5):
        world.pass_time(60)
        world.step(*MODEL)
    assert world.writes == before


def test_a_changed_setting_is_rolled_out_inside_the_generation(world: World) -> None:
    serve(world)
    [old] = deployments(world)
    config = [item["metadata"]["name"] for item in world.of("chat", "ConfigMap")]
    world.edit(*MODEL, retrieval={"topK": 50})
    world.step(*MODEL)
    assert world.condition(*MODEL)["status"] == "False"
    assert world.condition(*MODEL)["observedGeneration"] == 2
    world.settle()
    assert deployments(world) == [old]
    assert world.condition(*MODEL)["status"] == "False"
    world.roll_out_all()
    world.settle()
    assert world.condition(*MODEL)["status"] == "True"
    new_config = [item["metadata"]["name"] for item in world.of("chat", "ConfigMap")]
    assert len(new_config) == 1
    assert new_config != config


def test_a_new_fingerprint_comes_up_beside_and_takes_over_when_ready(world: World) -> None:
    serve(world)
    [old] = deployments(world)
    world.edit(*STORE, encoding={"policy": "none"})
    encode(world, "e" * 64)
    assert sorted(deployments(world)) != [old]
    assert len(deployments(world)) == 2
    assert selected(world) == old
    assert world.condition(*MODEL)["status"] == "False"
    assert world.condition(*MODEL, "ServerAvailable")["status"] == "True"
    new = next(name for name in deployments(world) if name != old)
    [live] = [
        d for d in world.of("chat", "Deployment") if d["metadata"]["labels"][GENERATION] == new
    ]
    world.roll_out(live)
    plan = world.step(*MODEL)
    assert selected(world) == new
    assert not [ref for ref in plan.delete if ref.kind.kind == "Deployment"]  # not in one step
    world.settle()
    assert deployments(world) == [new]
    assert world.condition(*MODEL)["status"] == "True"


def test_a_revert_in_the_middle_keeps_what_serves(world: World) -> None:
    serve(world)
    [old] = deployments(world)
    uid = world.of("chat", "Deployment")[0]["metadata"]["uid"]
    world.edit(*MODEL, serving={"engineArgs": ["--enforce-eager"]})
    world.settle()
    assert len(deployments(world)) == 2
    world.edit(*MODEL, serving={})
    world.settle()
    assert deployments(world) == [old]
    assert world.of("chat", "Deployment")[0]["metadata"]["uid"] == uid
    assert selected(world) == old
    assert world.condition(*MODEL)["status"] == "True"


def test_a_third_generation_replaces_the_second_and_not_the_first(world: World) -> None:
    serve(world)
    [old] = deployments(world)
    world.edit(*MODEL, serving={"engineArgs": ["--a"]})
    world.settle()
    world.edit(*MODEL, serving={"engineArgs": ["--b"]})
    world.settle()
    assert len(deployments(world)) == 2
    assert selected(world) == old
    assert len(world.of("chat", "ConfigMap")) <= 2


def test_a_store_that_is_encoded_again_for_the_same_does_not_move_servers(world: World) -> None:
    serve(world)
    before = deployments(world)
    world.config_map("facts", {"facts.jsonl": "{}\n{}"})
    encode(world)
    assert deployments(world) == before
    assert world.condition(*MODEL)["status"] == "True"


def test_while_a_store_is_encoded_for_another_spec_the_old_goes_on(world: World) -> None:
    serve(world)
    [old] = deployments(world)
    world.edit(*STORE, encoding={"policy": "none"})
    world.settle()
    assert selected(world) == old
    assert deployments(world) == [old]


@pytest.mark.parametrize(("field", "value"), [("id", "other"), ("dtype", "bfloat16")])
def test_a_store_for_another_model_is_named(world: World, field: str, value: str) -> None:
    serve(world)
    before = deployments(world)
    world.edit(*MODEL, model={**MODEL_SPEC["model"], field: value})
    world.settle()
    condition = world.condition(*MODEL, "Compatible")
    assert condition["reason"] == "OtherModel"
    assert f"spec.model.{field}" in condition["message"]
    assert value in condition["message"]
    assert deployments(world) == before


def test_tensor_parallel_size_must_divide_the_heads(world: World) -> None:
    world.edit(*MODEL, serving={"tensorParallelSize": 2})
    encode(world, model={"num_layers": 30, "num_kv_heads": 3, "head_dim": 64, "dtype": "float32"})
    condition = world.condition(*MODEL)
    assert condition["reason"] == "TensorParallelSize"
    assert "tensorParallelSize 2" in condition["message"]
    assert "3 KV heads" in condition["message"]
    assert not deployments(world)


def test_a_missing_store_is_named_and_waited_for(world: World) -> None:
    world.edit(*MODEL, memoryStores=[{"name": "nobody"}])
    world.settle()
    condition = world.condition(*MODEL)
    assert condition["reason"] == "StoreMissing"
    assert "'nobody'" in condition["message"]


def test_a_deleted_store_is_not_served_any_longer(world: World) -> None:
    serve(world)
    world.delete(*STORE)
    world.step(*MODEL)
    assert not deployments(world)
    assert world.condition(*MODEL)["reason"] == "StoreMissing"


def test_the_other_stores_go_on(world: World) -> None:
    world.add("MemoryStore", "ben", STORE_SPEC)
    world.edit(*MODEL, memoryStores=[{"name": "maya"}, {"name": "ben"}])
    serve(world)
    both = deployments(world)
    assert len(both) == 1
    world.delete("MemoryStore", "ben")
    world.settle()
    world.roll_out_all()
    world.settle()
    assert len(deployments(world)) == 1
    assert deployments(world) != both


def test_a_missing_secret_keeps_what_serves(world: World) -> None:
    serve(world)
    before = deployments(world)
    world.edit(*MODEL, auth={"mode": "apiKey", "secretRef": {"name": "keys"}})
    world.settle()
    condition = world.condition(*MODEL, "RolledOut")
    assert condition["reason"] == "SecretMissing"
    assert "spec.auth.secretRef" in condition["message"]
    assert deployments(world) == before
    world.secret("keys", "api-key")
    world.settle()
    world.roll_out_all()
    world.settle()
    assert world.condition(*MODEL)["status"] == "True"


def test_a_generated_key_is_made_once(world: World) -> None:
    world.edit(*MODEL, auth={"mode": "apiKey"})
    serve(world)
    [secret] = world.of("chat", "Secret")
    uid = secret["metadata"]["uid"]
    world.edit(*MODEL, retrieval={"topK": 3})
    world.settle()
    assert world.of("chat", "Secret")[0]["metadata"]["uid"] == uid
    world.edit(*MODEL, auth={"mode": "none"})
    world.settle()
    assert not world.of("chat", "Secret")


def test_replicas_of_zero_are_no_ready_server(world: World) -> None:
    world.edit(*MODEL, serving={"replicas": 0})
    serve(world)
    assert world.condition(*MODEL)["reason"] == "ScaledToZero"


def test_scaling_does_not_make_a_generation(world: World) -> None:
    serve(world)
    before = deployments(world)
    world.edit(*MODEL, serving={"replicas": 3})
    world.settle()
    assert deployments(world) == before
    assert world.of("chat", "Deployment")[0]["spec"]["replicas"] == 3
    assert world.of("chat", "PodDisruptionBudget")
    world.edit(*MODEL, serving={"replicas": 1})
    world.settle()
    assert not world.of("chat", "PodDisruptionBudget")


def test_keda_that_is_not_there_is_said_and_serving_goes_on(world: World) -> None:
    serve(world)
    world.edit(
        *MODEL,
        autoscaling={"provider": "keda", "prometheusAddress": "http://prometheus:9090"},
    )
    world.settle()
    assert world.condition(*MODEL, "ScalingReady")["reason"] == "KedaMissing"
    assert world.condition(*MODEL)["status"] == "True"
    assert not world.of("chat", "ScaledObject")
    world.optional_kinds = frozenset({"ScaledObject"})
    world.settle()
    assert not world.of("chat", "ScaledObject")  # its metrics were not seen yet
    world.run_servers({})
    world.tell_load(PodLoad(0.0, names={"running": "r", "waiting": "w"}))
    world.settle()
    assert world.of("chat", "ScaledObject")
    world.run_servers()
    world.tell_load()
    world.resources[MODEL]["status"].pop("autoscaling")  # an operator that knows nothing yet
    world.settle()
    assert world.of("chat", "ScaledObject")


def test_a_crashing_image_is_shown_with_its_last_line(world: World) -> None:
    encode(world)
    [generation] = deployments(world)
    world.pods["p"] = {
        "metadata": {"name": "p", "labels": {GENERATION: generation}},
        "status": {
            "containerStatuses": [
                {
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                    "lastState": {"terminated": {"exitCode": 1, "message": "a\nout of memory\n"}},
                }
            ]
        },
    }
    world.settle()
    condition = world.condition(*MODEL)
    assert condition["reason"] == "CrashLoopBackOff"
    assert "out of memory" in condition["message"]


def test_every_drifted_child_is_repaired(world: World) -> None:
    world.edit(*MODEL, serving={"replicas": 2})
    serve(world)
    wanted_children = {
        key: copy.deepcopy(item) for key, item in world.children.items() if key[0] == "chat"
    }
    for key in [key for key in world.children if key[0] == "chat"]:
        wanted = world.children[key]
        if "spec" in wanted:
            emptied = dict.fromkeys(wanted["spec"])
            world.children[key] = {**wanted, "spec": {**emptied, "replicas": 7}}
        else:
            world.children[key] = {
                **wanted,
                "metadata": {**wanted["metadata"], "labels": {}},
                "data": {},
            }
    for key in [key for key in world.children if key[0] == "chat" and key[1][0] == "ConfigMap"]:
        del world.children[key]
    world.step(*MODEL)
    world.roll_out_all()
    world.settle()
    assert world.condition(*MODEL)["status"] == "True"
    repaired = {key: item for key, item in world.children.items() if key[0] == "chat"}
    assert repaired.keys() == wanted_children.keys()
    for key, item in repaired.items():
        for part in ("spec", "data"):
            assert item.get(part) == wanted_children[key].get(part), key


def test_a_bent_service_in_a_rollout_goes_back_to_what_serves(world: World) -> None:
    serve(world)
    [old] = deployments(world)
    world.edit(*MODEL, serving={"engineArgs": ["--a"]})
    world.settle()
    world.of("chat", "Service")[0]["spec"]["selector"] = {"x": "y"}
    world.settle()
    assert selected(world) == old
    del world.children["chat", ("Service", "chat")]
    world.settle()
    assert selected(world) == old


def test_statuses_are_what_the_schema_keeps(world: World) -> None:
    serve(world)
    world.edit(*MODEL, serving={"engineArgs": ["--a"]})
    world.settle()
    for resource in world.resources.values():
        assert find_problems(resource) == []
