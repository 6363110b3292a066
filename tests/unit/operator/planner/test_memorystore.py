from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from planner_world import FINGERPRINT, STORE_SPEC, World, jobs_of

from inferscale_operator.desired.naming import ATTEMPT, FINALIZER

STORE = ("MemoryStore", "maya")


@pytest.fixture
def world() -> World:
    world = World()
    world.config_map("facts", {"facts.jsonl": "{}"})
    world.add(*STORE, STORE_SPEC)
    return world


def encoded(world: World) -> None:
    world.settle()
    world.finish_all_jobs()
    world.settle()


def test_a_new_store_gets_its_children_and_one_job(world: World) -> None:
    world.settle()
    kinds = sorted(kind for _, (kind, _) in world.children)
    assert kinds == [
        "ConfigMap",
        "Job",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "ServiceAccount",
    ]
    assert FINALIZER in world.resources[STORE]["metadata"]["finalizers"]
    assert world.condition(*STORE)["reason"] == "Encoding"


def test_the_finished_job_makes_it_ready(world: World) -> None:
    encoded(world)
    status = world.resources[STORE]["status"]
    assert world.condition(*STORE)["status"] == "True"
    assert status["fingerprint"] == FINGERPRINT
    assert status["facts"] == {"users": 1, "total": 3, "encoded": 3, "summary": "3/3"}
    assert status["encodedModel"] == "builtin:smollm2-135m@:float32"


def test_nothing_is_written_when_nothing_changed(world: World) -> None:
    encoded(world)
    before = world.writes
    for _ in range(5):
        world.pass_time(60)
        world.step(*STORE)
    assert world.writes == before


def test_a_former_spec_is_encoded_again_after_a_job_for_another(world: World) -> None:
    encoded(world)
    world.edit(*STORE, encoding={"policy": "none"})
    world.settle()
    world.finish_all_jobs()  # it ends, and has written, before anybody looks
    world.edit(*STORE, encoding={})
    world.settle()
    assert world.condition(*STORE)["reason"] == "Encoding"
    world.finish_all_jobs()
    world.settle()
    assert world.condition(*STORE)["status"] == "True"


def test_placement_is_no_reason_to_encode(world: World) -> None:
    encoded(world)
    [job] = jobs_of(world, "maya")
    world.edit(*STORE, placement={"tier": "GPU", "priority": 7, "floor": "1Gi"})
    world.settle()
    assert jobs_of(world, "maya") == [job]
    assert world.condition(*STORE)["status"] == "True"


def test_reports_of_all_pods_are_summed(world: World) -> None:
    world.edit(*STORE, job={"parallelism": 3})
    encoded(world)
    assert world.resources[STORE]["status"]["facts"]["summary"] == "9/9"
    assert world.resources[STORE]["status"]["storeBytes"] == 300


def test_changed_facts_start_a_new_job_and_leave_it_ready(world: World) -> None:
    encoded(world)
    first = jobs_of(world, "maya")[0]["metadata"]["name"]
    world.config_map("facts", {"facts.jsonl": "{}\n{}"})
    world.settle()
    jobs = [job["metadata"]["name"] for job in jobs_of(world, "maya")]
    assert len(jobs) == 1
    assert jobs != [first]
    assert world.condition(*STORE)["status"] == "True"
    assert world.condition(*STORE, "Encoded") | {"message": ""} == {
        **world.condition(*STORE, "Encoded"),
        "message": "",
        "status": "False",
        "reason": "Refreshing",
    }
    world.finish_all_jobs()
    world.settle()
    assert world.condition(*STORE, "Encoded")["status"] == "True"


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"encoding": {"policy": "none"}}, True),
        ({"prompt": {"heading": "Known facts:\n"}}, True),
        ({"model": {"id": "other", "dtype": "float32"}}, True),
        ({"job": {"image": "example.invalid/runtime:2"}}, True),
        ({"retention": {"maxAgeDays": 30}}, True),
        ({"job": {"nodeSelector": {"a": "b"}}}, False),
        ({"retention": {"onDelete": "Retain"}}, False),
        ({"suspend": True}, False),
    ],
)
def test_only_what_needs_it_is_encoded_again(world: World, change: dict, again: bool) -> None:
    encoded(world)
    world.edit(*STORE, **change)
    world.settle()
    assert bool(world.active_jobs()) is again
    assert world.condition(*STORE)["status"] == ("False" if again else "True")
    assert world.condition(*STORE)["observedGeneration"] == 2


def test_a_job_for_another_spec_is_stopped_before_the_next_starts(world: World) -> None:
    world.settle()
    [old] = jobs_of(world, "maya")
    world.edit(*STORE, encoding={"policy": "none"})
    plan = world.plan(*STORE)
    assert [ref.name for ref in plan.delete] == [old["metadata"]["name"]]
    assert not plan.create
    old["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    assert not world.plan(*STORE).create  # its pods may still write
    world.children.pop(("maya", ("Job", old["metadata"]["name"])))
    assert world.plan(*STORE).create


def test_a_job_for_older_facts_may_end_and_counts(world: World) -> None:
    world.settle()
    [old] = jobs_of(world, "maya")
    world.config_map("facts", {"facts.jsonl": "{}\n{}"})
    assert not world.step(*STORE).delete
    world.finish(old)
    world.step(*STORE)
    assert world.resources[STORE]["status"]["fingerprint"] == FINGERPRINT
    world.settle()
    [new] = world.active_jobs()
    assert new["metadata"]["name"] != old["metadata"]["name"]
    assert world.condition(*STORE)["status"] == "True"


def test_a_failed_job_is_tried_again_with_growing_pauses_and_not_for_ever(world: World) -> None:
    world.edit(*STORE, job={"backoffLimit": 2})
    pauses = []
    for attempt in range(3):
        world.settle()
        [job] = world.active_jobs()
        assert job["metadata"]["labels"][ATTEMPT] == str(attempt)
        world.fail(job, 1, f"first line\ninferscale: error: no space, attempt {attempt}")
        plan = world.step(*STORE)
        assert f"no space, attempt {attempt}" in world.condition(*STORE, "Encoded")["message"]
        pauses.append(plan.requeue_seconds)
        world.pass_time(pauses[-1] or 0)
    world.settle()
    assert not world.active_jobs()
    assert pauses[0] == 10
    assert pauses[1] == 20
    assert world.condition(*STORE)["reason"] == "EncodingFailed"
    world.edit(*STORE, job={"backoffLimit": 2, "resources": {"requests": {"memory": "8Gi"}}})
    world.settle()
    assert len(world.active_jobs()) == 1  # a mended spec is a new try


def test_bad_input_waits_for_a_person(world: World) -> None:
    world.settle()
    world.fail(world.active_jobs()[0], 2, "facts.jsonl:3: field 'text' is empty. Write the fact")
    world.settle()
    world.pass_time(3600)
    world.pods.clear()
    world.settle()
    assert not world.active_jobs()
    condition = world.condition(*STORE)
    assert condition["reason"] == "BadInput"
    assert "facts.jsonl:3: field 'text' is empty" in condition["message"]
    world.config_map("facts", {"facts.jsonl": "mended"})
    world.settle()
    assert len(world.active_jobs()) == 1


def test_lost_reports_are_asked_for_again(world: World) -> None:
    world.settle()
    [job] = world.active_jobs()
    world.finish(job)
    world.pods.clear()
    world.settle()
    [again] = world.active_jobs()
    assert again["metadata"]["labels"][ATTEMPT] == "1"


def test_progress_is_shown(world: World) -> None:
    world.settle()
    [job] = world.active_jobs()
    name = f"{job['metadata']['name']}-0"
    world.pods[name] = {
        "metadata": {
            "name": name,
            "labels": {"batch.kubernetes.io/job-name": job["metadata"]["name"]},
        },
        "status": {"phase": "Running"},
    }
    world.reports[name] = {"state": "encoding", "users": 2, "facts": 10, "pending": 4}
    world.settle()
    assert world.resources[STORE]["status"]["facts"]["summary"] == "6/10"
    assert "6 of 10 facts" in world.condition(*STORE)["message"]


def test_an_image_that_cannot_be_pulled_is_named(world: World) -> None:
    world.settle()
    [job] = world.active_jobs()
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    world.pods["p"] = {
        "metadata": {
            "name": "p",
            "labels": {"batch.kubernetes.io/job-name": job["metadata"]["name"]},
        },
        "status": {
            "phase": "Pending",
            "containerStatuses": [{"image": "nowhere/x", "state": {"waiting": waiting}}],
        },
    }
    world.settle()
    condition = world.condition(*STORE)
    assert condition["reason"] == "ImagePullBackOff"
    assert "spec.job.image 'nowhere/x': not found" in condition["message"]


@pytest.mark.parametrize(
    ("spec", "reason", "field"),
    [
        ({"source": {"configMap": {"name": "none"}}}, "ConfigMapMissing", "spec.source.configMap"),
        (
            {"source": {"configMap": {"name": "facts", "key": "other"}}},
            "ConfigMapKeyMissing",
            "'other'",
        ),
        (
            {"source": {"pvc": {"claimName": "none"}}},
            "PersistentVolumeClaimMissing",
            "spec.source.pvc.claimName",
        ),
        (
            {
                "source": {
                    "http": {
                        "url": "https://x/facts",
                        "authorizationSecretRef": {"name": "s", "key": "k"},
                    }
                }
            },
            "SecretMissing",
            "spec.source.http.authorizationSecretRef",
        ),
        (
            {
                "source": {"http": {"url": "https://x/facts"}, "refresh": "99 * * * *"},
            },
            "InvalidSchedule",
            "spec.source.refresh '99 * * * *'",
        ),
        (
            {
                "storage": {
                    "s3": {"url": "s3://bucket/x", "credentialsSecretRef": {"name": "empty"}}
                }
            },
            "SecretKeyMissing",
            "spec.storage.s3.credentialsSecretRef",
        ),
    ],
)
def test_what_is_missing_is_named(world: World, spec: dict, reason: str, field: str) -> None:
    world.secret("empty")
    world.edit(*STORE, **spec)
    world.settle()
    condition = world.condition(*STORE)
    assert (condition["status"], condition["reason"]) == ("False", reason)
    assert field in condition["message"]
    assert not world.active_jobs()


def test_it_goes_on_when_the_missing_comes(world: World) -> None:
    world.edit(*STORE, source={"configMap": {"name": "later"}})
    world.settle()
    world.config_map("later", {"a.jsonl": "{}"})
    world.settle()
    assert len(world.active_jobs()) == 1


def test_a_schedule_starts_a_job_when_it_is_due(world: World) -> None:
    world.edit(*STORE, source={"http": {"url": "https://x/f"}, "refresh": "0 * * * *"})
    encoded(world)
    assert world.resources[STORE]["status"]["nextSyncTime"] == "2026-01-01T13:00:00Z"
    plan = world.step(*STORE)
    assert plan.requeue_seconds == 3600
    world.pass_time(3599)
    world.settle()
    assert not world.active_jobs()
    world.pass_time(1)
    world.settle()
    assert len(world.active_jobs()) == 1


def test_an_invalid_spec_is_reported_with_its_path(world: World) -> None:
    world.edit(*STORE, model={"id": "x", "maxModelLen": 3})
    plan = world.step(*STORE)
    condition = world.condition(*STORE)
    assert condition["reason"] == "InvalidSpec"
    assert "spec.model.maxModelLen 3" in condition["message"]
    assert not plan.apply
    assert not world.step(*STORE).events


def test_events_come_once_per_change(world: World) -> None:
    encoded(world)
    reasons = [event.reason for event in world.events]
    assert reasons.count("Encoding") == 1
    assert reasons.count("EncodingComplete") == 1


def test_deleting_erases_then_lets_go(world: World) -> None:
    encoded(world)
    world.delete(*STORE)
    world.settle()
    [eraser] = world.active_jobs()
    assert eraser["metadata"]["name"].startswith("maya-erase-")
    assert "ownerReferences" not in eraser["metadata"]
    assert STORE in world.resources
    world.finish(eraser)
    world.settle()
    assert STORE not in world.resources
    assert not world.children
    [event] = [event for event in world.events if event.reason == "Erased"]
    assert "4 files, 100 bytes" in event.message


def test_deleting_while_encoding_stops_the_job_first(world: World) -> None:
    world.settle()
    [job] = world.active_jobs()
    world.delete(*STORE)
    plan = world.plan(*STORE)
    assert [ref.name for ref in plan.delete] == [job["metadata"]["name"]]
    assert not plan.create


def test_a_job_that_the_status_does_not_know_has_written_all_the_same(world: World) -> None:
    world.settle()
    world.resources[STORE].pop("status")
    world.delete(*STORE)
    world.settle()
    assert [job["metadata"]["name"][:11] for job in world.active_jobs()] == ["maya-erase-"]


@pytest.mark.parametrize("way", ["foreground", "namespace", "retain", "never"])
def test_deleting_never_hangs(world: World, way: str) -> None:
    if way == "retain":
        world.edit(*STORE, retention={"onDelete": "Retain"})
        world.resources[STORE]["metadata"]["finalizers"].append(FINALIZER)
    if way == "never":
        world.edit(*STORE, suspend=True)
    if way != "never":
        encoded(world)
    world.settle()
    if way == "foreground":
        claim = world.children["maya", ("PersistentVolumeClaim", "maya-store")]
        claim["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    world.terminating = way == "namespace"
    world.delete(*STORE)
    world.settle()
    assert STORE not in world.resources


def test_an_erase_that_fails_is_tried_again_and_bounded(world: World) -> None:
    encoded(world)
    world.delete(*STORE)
    world.settle()
    world.fail(world.active_jobs()[0], 1, "no route to the bucket")
    world.step(*STORE)
    assert "no route to the bucket" in world.condition(*STORE)["message"]
    world.settle()
    assert len(world.active_jobs()) == 1
    world.pass_time(600)
    world.settle()
    assert STORE not in world.resources
    assert [event.reason for event in world.events].count("EraseIncomplete") == 1


def test_an_operator_that_comes_back_late_lets_go(world: World) -> None:
    encoded(world)
    world.delete(*STORE)
    world.pass_time(86_400)
    world.settle()
    assert STORE not in world.resources


def test_times_of_the_status_are_rfc_3339(world: World) -> None:
    encoded(world)
    text = world.resources[STORE]["status"]["lastSyncTime"]
    assert datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC) == world.now
    assert json.dumps(world.resources[STORE]["status"])
