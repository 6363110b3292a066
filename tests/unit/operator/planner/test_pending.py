"""Facts that come through the memory API get their job, and a server may write them."""

from __future__ import annotations

from typing import Any

import pytest
from planner_world import MODEL_SPEC, STORE_SPEC, World, jobs_of

STORE = ("MemoryStore", "maya")
MODEL = ("PersonalizedModel", "chat")
SOURCE = {"api": {"pendingSeconds": 60, "pendingFacts": 10}}


@pytest.fixture
def world() -> World:
    world = World()
    world.add(*STORE, {**STORE_SPEC, "source": SOURCE})
    world.add(*MODEL, MODEL_SPEC)
    world.settle()
    world.finish_all_jobs()
    world.settle()
    world.roll_out_all()
    world.settle()
    return world


def say(world: World, pending: int | None) -> None:
    """Both pods tell their count; one of them is behind."""
    world.run_servers({}, {})
    for number, report in enumerate(world.reports.values()):
        if pending is not None:
            report["stores"] = [{"name": "maya", "pending": max(0, pending - number)}]
    world.settle()


def runs(world: World) -> int:
    return int((world.resources[STORE]["status"].get("pending") or {}).get("runs", 0))


def finish(world: World, **report: Any) -> None:
    [job] = world.active_jobs()
    world.finish(job, {"fingerprint": "f" * 64, "users": 1, "facts": 9, **report})
    world.settle()


def test_the_job_reads_no_input_and_the_server_may_write(world: World) -> None:
    [job] = jobs_of(world, "maya")
    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--pending" in arguments
    assert "--input" not in arguments
    [server] = world.of("chat", "Deployment")
    mounts = server["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert [m.get("readOnly", False) for m in mounts if m["name"] == "store-maya"] == [False]


def test_waiting_facts_get_one_job_after_a_while(world: World) -> None:
    world.pass_time(300)
    say(world, 3)
    assert world.resources[MODEL]["status"]["pendingFacts"] == [{"name": "maya", "facts": 3}]
    assert (world.active_jobs(), runs(world)) == ([], 0)
    world.pass_time(59)
    say(world, 4)
    assert world.active_jobs() == []
    world.pass_time(2)
    say(world, 4)
    assert len(world.active_jobs()) == runs(world) == 1
    assert world.condition(*STORE)["status"] == "True", "what is encoded stays in use"
    world.pass_time(600)
    say(world, 50)
    assert len(world.active_jobs()) == runs(world) == 1, "never two at once"
    finish(world)
    say(world, 50)
    assert world.active_jobs() == [], "the count may be older than the end of the job"
    for seconds in (60, 61, 600):
        world.pass_time(seconds)
        say(world, 0)
    assert (world.active_jobs(), runs(world)) == ([], 1)
    assert world.resources[STORE]["status"]["pending"] == {"facts": 0, "tooLong": 0, "runs": 1}


def test_many_waiting_facts_get_a_job_at_once(world: World) -> None:
    world.pass_time(300)
    say(world, 10)
    assert len(world.active_jobs()) == 1


def test_no_job_without_a_count_or_while_suspended(world: World) -> None:
    world.pass_time(1000)
    say(world, None)
    assert world.active_jobs() == []
    world.edit(*STORE, suspend=True)
    say(world, 100)
    world.pass_time(1000)
    say(world, 100)
    assert world.active_jobs() == []


def test_facts_that_no_job_can_encode_do_not_start_one_after_another(world: World) -> None:
    world.pass_time(300)
    say(world, 12)
    finish(world, too_long=12)
    world.pass_time(130)
    say(world, 12)
    world.pass_time(600)
    say(world, 12)
    assert (world.active_jobs(), runs(world)) == ([], 1)
    say(world, 13)
    assert len(world.active_jobs()) == 1, "one more that waits"


def test_another_debounce_encodes_nothing_again(world: World) -> None:
    world.edit(*STORE, source={"api": {"pendingSeconds": 120, "pendingFacts": 5}})
    world.settle()
    assert world.active_jobs() == []
