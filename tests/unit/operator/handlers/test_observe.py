from __future__ import annotations

from typing import Any

import pytest

from inferscale_operator.handlers.observe import in_progress, own_children
from inferscale_operator.planner.references import references

RESOURCE = {"kind": "MemoryStore", "metadata": {"name": "m", "namespace": "ns", "uid": "u"}}


def owned(uid: str | None) -> dict[str, Any]:
    owners = [] if uid is None else [{"controller": True, "uid": uid}]
    return {"metadata": {"ownerReferences": owners}}


def test_children_of_a_former_resource_are_not_ours() -> None:
    children = {
        ("Job", "ours"): owned("u"),
        ("Job", "former"): owned("former"),
        ("Job", "loose"): owned(None),
    }
    assert {name for _, name in own_children(RESOURCE, children)} == {"ours", "loose"}


def job(*conditions: str) -> dict[str, Any]:
    status = {"conditions": [{"type": name, "status": "True"} for name in conditions]}
    return {"kind": "Job", "metadata": {"name": "j"}, "status": status}


@pytest.mark.parametrize(
    ("recorded", "child", "expected"),
    [
        ({}, job(), True),
        ({}, job("Complete"), True),
        ({"name": "j"}, job("Complete"), True),
        ({"name": "j", "finishedAt": "t"}, job("Complete"), False),
        ({"name": "j", "finishedAt": "t"}, job("Failed"), False),
        ({"name": "other", "finishedAt": "t"}, job("Failed"), True),
        ({"name": "j", "finishedAt": "t"}, job("Suspended"), True),
    ],
)
def test_pods_of_a_job_matter_until_its_end_is_recorded(
    recorded: dict[str, str], child: dict[str, Any], expected: bool
) -> None:
    assert in_progress({**RESOURCE, "status": {"job": recorded}}, child) is expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, True),
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2, "readyReplicas": 1}, True),
        ({"observedGeneration": 2, "replicas": 3, "updatedReplicas": 2, "readyReplicas": 2}, True),
        ({"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2, "readyReplicas": 2}, True),
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2, "readyReplicas": 2}, False),
    ],
)
def test_pods_of_a_deployment_matter_while_it_rolls_out(
    status: dict[str, int], expected: bool
) -> None:
    child = {
        "kind": "Deployment",
        "metadata": {"name": "d", "generation": 2},
        "spec": {"replicas": 2},
        "status": status,
    }
    assert in_progress(RESOURCE, child) is expected


def test_references_of_a_store() -> None:
    spec = {
        "model": {"tokenSecretRef": {"name": "hub", "key": "k"}, "cache": {"claimName": "cache"}},
        "source": {"s3": {"url": "s3://b", "credentialsSecretRef": {"name": "keys"}}},
        "storage": {"s3": {"credentialsSecretRef": {"name": "keys"}}},
        "job": {"imagePullSecrets": [{"name": "pull"}]},
    }
    assert references({"spec": spec}) == [
        ("Secret", "hub"),
        ("Secret", "keys"),
        ("PersistentVolumeClaim", "cache"),
        ("Secret", "pull"),
    ]


def test_references_of_a_model() -> None:
    spec = {"memoryStores": [{"name": "a"}, {"name": "b"}], "auth": {"secretRef": {"name": "key"}}}
    assert references({"spec": spec}) == [
        ("Secret", "key"),
        ("MemoryStore", "a"),
        ("MemoryStore", "b"),
    ]


def test_broken_spec_names_nothing() -> None:
    assert references({"spec": {"source": "text", "storage": None}}) == []
    assert references({}) == []
