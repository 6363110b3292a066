"""Whatever happens in whatever order, the same final objects are reached."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from planner_world import MODEL_SPEC, STORE_SPEC, World

from inferscale_operator.desired.naming import INPUT

STORE = ("MemoryStore", "maya")
MODEL = ("PersonalizedModel", "chat")

Event = Callable[[World], None]


def _edit_store(**changes: Any) -> Event:
    return lambda world: world.edit(*STORE, **changes)


def _edit_model(**changes: Any) -> Event:
    return lambda world: world.edit(*MODEL, **changes)


def _facts(text: str) -> Event:
    return lambda world: world.config_map("facts", {"facts.jsonl": text})


def _finish_one(world: World) -> None:
    jobs = world.active_jobs()
    if jobs:
        world.finish(jobs[0], _report(jobs[0]))


def _fail_one(world: World) -> None:
    jobs = world.active_jobs()
    if jobs:
        world.fail(jobs[0], 1, "lost")


def _remove(index: int) -> Event:
    def event(world: World) -> None:
        keys = sorted(world.children)
        if keys:
            del world.children[keys[index % len(keys)]]

    return event


def _bend(index: int) -> Event:
    def event(world: World) -> None:
        keys = [key for key in sorted(world.children) if key[1][0] not in ("Job", "ConfigMap")]
        if keys:
            world.children[keys[index % len(keys)]]["metadata"]["labels"]["inferscale.dev/x"] = "y"
            spec = world.children[keys[index % len(keys)]].get("spec", {})
            if "replicas" in spec:
                spec["replicas"] = 9

    return event


def _run_servers(world: World) -> None:
    world.run_servers({"maya": 1.0})


def _report(job: dict[str, Any]) -> dict[str, Any]:
    """Another spec, another fingerprint, as the encoder would say."""
    half = job["metadata"]["labels"][INPUT][:12]
    return {"fingerprint": (half * 6)[:64], "users": 1, "facts": 1, "store_bytes": 1}


EVENTS: list[Event] = [
    _edit_store(encoding={"policy": "none"}),
    _edit_store(encoding={"policy": "facts:5"}),
    _edit_model(retrieval={"topK": 7}),
    _edit_model(serving={"replicas": 3}),
    _edit_model(serving={"engineArgs": ["--enforce-eager"]}),
    _edit_model(auth={"mode": "apiKey"}),
    _edit_model(network={"enabled": False}),
    _facts("one"),
    _facts("two"),
    _finish_one,
    _fail_one,
    lambda world: world.roll_out_all(),
    lambda world: world.pass_time(30),
    lambda world: world.pods.clear(),
    _run_servers,
    lambda world: world.run_servers(),
    lambda world: world.report_ages.update(dict.fromkeys(world.reports, 61.0)),
    *(_remove(index) for index in range(4)),
    *(_bend(index) for index in range(4)),
]


def _new_world(store: dict[str, Any], model: dict[str, Any], facts: dict[str, str]) -> World:
    world = World()
    world.config_map("facts", facts)
    world.add(*STORE, store)
    world.add(*MODEL, model)
    return world


def _come_to_rest(world: World) -> None:
    for _ in range(20):
        world.settle(20)
        before = world.writes
        for job in world.active_jobs():
            world.finish(job, _report(job))
        world.roll_out_all()
        _run_servers(world)
        world.pass_time(2000)
        world.settle(20)
        if world.writes == before and not world.active_jobs():
            return
    raise AssertionError("it does not come to rest")


def _final(world: World) -> dict[Any, Any]:
    """What is left, without what only tells how it came about."""
    found = {}
    for key, item in world.children.items():
        item = copy.deepcopy(item)
        metadata = item["metadata"]
        for name in ("uid", "generation"):
            metadata.pop(name, None)
        for reference in metadata.get("ownerReferences", []):
            reference.pop("uid")
        annotations = metadata.get("annotations", {})
        annotations.pop("inferscale.dev/desired", None)
        if item["kind"] == "Job":
            # A finished Job may be gone (the status knows its result), and none is active at rest.
            continue
        if item["kind"] == "Deployment":
            # The mark of a generated key differs with its uid.
            item["spec"]["template"]["metadata"].pop("annotations", None)
        metadata["labels"].pop("inferscale.dev/x", None)
        item.pop("status", None)
        found[key[0], *key[1]] = item
    return found


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(
    st.lists(
        st.tuples(st.sampled_from(range(len(EVENTS))), st.sampled_from(("", "s", "m", "sm", "ms"))),
        min_size=6,
        max_size=16,
    )
)
def test_any_order_of_events_reaches_the_same_objects(order: list[tuple[int, str]]) -> None:
    world = _new_world(STORE_SPEC, MODEL_SPEC, {"facts.jsonl": "zero"})
    for index, steps in order:
        EVENTS[index](world)
        for step in steps:
            world.step(*(STORE if step == "s" else MODEL))
    _come_to_rest(world)
    store, model = world.resources[STORE], world.resources[MODEL]
    fresh = _new_world(store["spec"], model["spec"], world.others["ConfigMap", "facts"]["data"])
    _come_to_rest(fresh)
    assert _final(world) == _final(fresh)
    for field in ("encodedInput", "fingerprint", "facts"):
        assert store["status"][field] == fresh.resources[STORE]["status"][field]
    assert world.condition(*MODEL, "MetricsFresh")["status"] == "True"
    assert store["status"]["tier"] == "dram"
    for resource in (STORE, MODEL):
        assert world.condition(*resource)["status"] == "True"
        generation = world.resources[resource]["metadata"]["generation"]
        assert world.condition(*resource)["observedGeneration"] == generation
