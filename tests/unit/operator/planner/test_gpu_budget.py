"""GPU memory: what is passed to vLLM, what is refused, and what holds while nodes come and go."""

from __future__ import annotations

import json
from typing import Any

import pytest
from planner_world import MODEL_SPEC, STORE_SPEC, World

from inferscale_operator.api.strict import find_problems
from inferscale_operator.planner.gpu_budget import engine_flag

STORE, MODEL = ("MemoryStore", "maya"), ("PersonalizedModel", "chat")
GIB = 1 << 30
LLAMA_8B = {
    "num_layers": 32,
    "num_attention_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "weight_bytes": 16 * GIB,
}
ONE_GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}


def served(memory: int | None, shape: dict[str, Any] | None = None, **spec: Any) -> World:
    """A model with this spec, its store encoded."""
    world = World()
    world.gpu_memory_bytes = memory
    world.config_map("facts", {"facts.jsonl": "{}"})
    world.add(*STORE, STORE_SPEC)
    world.add(*MODEL, {**MODEL_SPEC, **spec})
    world.settle()
    report = {"fingerprint": "f" * 64, "facts": 1, "store_bytes": 9, "model": shape or LLAMA_8B}
    for job in world.active_jobs():
        world.finish(job, report)
    world.settle()
    return world


def arguments(world: World) -> list[str]:
    [deployment] = world.of("chat", "Deployment")
    return list(deployment["spec"]["template"]["spec"]["containers"][0]["args"])


def arena(world: World) -> int:
    config = next(m for m in world.of("chat", "ConfigMap") if "config.json" in m["data"])
    return int(json.loads(config["data"]["config.json"])["tiers"].get("gpu_bytes", 0))


def model(length: int | None) -> dict[str, Any]:
    return MODEL_SPEC["model"] | ({} if length is None else {"maxModelLen": length})


def test_a_model_on_the_cpu_is_left_as_it_is() -> None:
    world = served(80 * GIB, tiers={"gpu": {"budget": "auto"}})
    assert "--gpu-memory-utilization" not in arguments(world)
    assert "budget" not in world.resources[MODEL]["status"]
    assert arena(world) == 0
    assert world.resources[MODEL]["status"]["tier"] == "dram 1Gi"


def test_known_memory_is_divided_and_shown() -> None:
    world = served(80 * GIB, serving=ONE_GPU, model=model(8192))
    share = arguments(world)[arguments(world).index("--gpu-memory-utilization") + 1]
    assert share == "0.9500"
    budget = world.resources[MODEL]["status"]["budget"]
    assert budget["gpuMemoryBytes"] == 80 * GIB
    assert budget["gpuMemoryUtilization"] == 0.95
    rows = {row["term"]: row["bytes"] for row in budget["rows"] if row["scope"] == "gpu"}
    assert rows["weights"] == 16 * GIB
    assert rows["KV need"] == 8192 * 131072
    assert find_problems(world.resources[MODEL]) == []


@pytest.mark.parametrize(("budget", "expected"), [("auto", 14.5), ("6Gi", 6.0)])
def test_an_arena_takes_its_part_from_the_engine(budget: str, expected: float) -> None:
    tiers = {"gpu": {"budget": budget}}
    world = served(80 * GIB, serving=ONE_GPU, model=model(8192), tiers=tiers)
    assert arena(world) == int(expected * GIB)
    assert world.resources[MODEL]["status"]["tier"].startswith("gpu ")
    share = float(arguments(world)[arguments(world).index("--gpu-memory-utilization") + 1])
    assert share == pytest.approx(0.95 - expected / 80, abs=1e-4)


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    world = served(24 * GIB, serving=ONE_GPU, model=model(65536))
    assert not world.of("chat", "Deployment")
    condition = world.condition(*MODEL)
    assert (condition["status"], condition["reason"]) == ("False", "BudgetExceeded")
    for words in ("24.00Gi", "weights 16.00Gi", "KV need 8.00Gi", "lower maxModelLen to"):
        assert words in condition["message"]
    assert world.resources[MODEL]["status"]["budget"]["rows"]
    world.edit(*MODEL, model=model(4096))
    world.settle()
    assert world.of("chat", "Deployment")


def test_what_serves_goes_on_when_a_new_spec_does_not_fit() -> None:
    world = served(24 * GIB, serving=ONE_GPU, model=model(4096))
    before = world.of("chat", "Deployment")
    world.roll_out_all()
    world.settle()
    world.edit(*MODEL, model=model(65536))
    world.settle()
    [live] = world.of("chat", "Deployment")
    assert live["spec"] == before[0]["spec"]
    assert world.condition(*MODEL, "ServerAvailable")["status"] == "True"
    assert world.condition(*MODEL)["reason"] == "BudgetExceeded"


def test_a_target_of_requests_counts() -> None:
    many = {**ONE_GPU, "engineArgs": ["--max_num_seqs=64"]}
    world = served(24 * GIB, serving=many, model=model(4096))
    assert "64 requests" in json.dumps(world.resources[MODEL]["status"]["budget"])
    assert world.condition(*MODEL)["reason"] == "BudgetExceeded"


def test_without_a_length_the_weights_still_have_to_fit() -> None:
    assert served(24 * GIB, serving=ONE_GPU).of("chat", "Deployment")
    small = served(16 * GIB, serving=ONE_GPU)
    assert small.condition(*MODEL)["reason"] == "BudgetExceeded"


@pytest.mark.parametrize(
    ("memory", "shape"), [(None, LLAMA_8B), (80 * GIB, {**LLAMA_8B, "weight_bytes": 0})]
)
def test_what_is_not_known_refuses_nothing(memory: int | None, shape: dict[str, Any]) -> None:
    tiers = {"gpu": {"budget": "6Gi"}}
    world = served(memory, shape, serving=ONE_GPU, model=model(65536), tiers=tiers)
    assert "--gpu-memory-utilization" not in arguments(world)
    assert arena(world) == 6 * GIB


def test_a_share_of_the_spec_stays_and_is_not_judged() -> None:
    own = {**ONE_GPU, "engineArgs": ["--gpu-memory-utilization", "0.99"]}
    world = served(17 * GIB, serving=own, model=model(65536), tiers={"gpu": {"budget": "auto"}})
    assert arguments(world).count("--gpu-memory-utilization") == 1
    assert arena(world) == 0
    assert "budget" not in world.resources[MODEL]["status"]


def test_nodes_that_come_and_go_replace_no_server() -> None:
    world = served(80 * GIB, serving=ONE_GPU, model=model(8192))
    before = arguments(world)
    world.gpu_memory_bytes = None
    world.settle()
    assert arguments(world) == before
    assert world.resources[MODEL]["status"]["budget"]["gpuMemoryBytes"] == 80 * GIB


def test_memory_of_a_gpu_without_a_gpu_is_named() -> None:
    world = served(None, tiers={"gpu": {"budget": "6Gi"}})
    condition = world.condition(*MODEL)
    assert condition["reason"] == "NoGpu"
    assert "spec.tiers.gpu.budget '6Gi'" in condition["message"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], None),
        (["--x", "1"], "1"),
        (["--x=1"], "1"),
        (["--x=1", "--x", "2"], "2"),
        (["--x", "--y"], ""),
        (["--x"], ""),
        (["--xy", "1"], None),
        (["x", "1"], None),
    ],
)
def test_flags_are_read_as_the_engine_reads_them(
    arguments: list[str], expected: str | None
) -> None:
    assert engine_flag(arguments, "--x") == expected
