from __future__ import annotations

import base64
from typing import Any

import pytest

from inferscale_operator.desired.kinds import Kind
from inferscale_operator.local.environment import MissingError, container_environment

POD: dict[str, Any] = {
    "metadata": {
        "name": "p",
        "namespace": "ns",
        "annotations": {"batch.kubernetes.io/job-completion-index": "3"},
    },
    "spec": {"containers": []},
}
OBJECTS = {
    ("ConfigMap", "c"): {"data": {"a": "1", "b": "2", "not a name": "3"}},
    ("Secret", "s"): {
        "data": {"key": base64.b64encode(b"top").decode()},
        "stringData": {"plain": "text"},
    },
    ("Secret", "bad"): {"data": {"key": "%%%"}},
}


def lookup(kind: Kind, name: str) -> dict[str, Any] | None:
    return OBJECTS.get((kind.kind, name))


def environment(local: dict[str, int] | None = None, **container: Any) -> dict[str, str]:
    return container_environment(POD, container, local or {}, lookup)


def test_values_refer_to_what_stands_before() -> None:
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)-$(C)"},
        {"name": "C", "value": "x"},
        {"name": "D"},
    ]
    assert environment(env=env) == {"A": "1", "B": "1-$(C)", "C": "x", "D": ""}


def test_references() -> None:
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    env = [
        {"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}},
        {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "a"}}},
        {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NS", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "I", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {
            "name": "O",
            "valueFrom": {"secretKeyRef": {"name": "none", "key": "k", "optional": True}},
        },
    ]
    assert environment(env=env) == {
        "S": "top",
        "C": "1",
        "N": "p",
        "NS": "ns",
        "IP": "127.0.0.1",
        "I": "3",
    }


def test_whole_objects_come_before_single_values() -> None:
    sources = [{"configMapRef": {"name": "c"}}, {"prefix": "S_", "secretRef": {"name": "s"}}]
    found = environment(envFrom=sources, env=[{"name": "a", "value": "own"}])
    assert found == {"a": "own", "b": "2", "S_key": "top", "S_plain": "text"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"secretKeyRef": {"name": "none", "key": "k"}}, 'secret "none" not found'),
        ({"secretKeyRef": {"name": "s", "key": "k"}}, "couldn't find key k in Secret s"),
        ({"secretKeyRef": {"name": "bad", "key": "key"}}, "not base64"),
        ({"fieldRef": {"fieldPath": "spec.strange"}}, "spec.strange"),
        ({"resourceFieldRef": {"resource": "limits.cpu"}}, '"X"'),
    ],
)
def test_what_is_missing_is_named(source: dict[str, Any], message: str) -> None:
    with pytest.raises(MissingError, match=message):
        environment(env=[{"name": "X", "valueFrom": source}])


def test_the_port_variable_is_the_port_of_this_machine() -> None:
    ports = [{"name": "http", "containerPort": 8000}, {"name": "status", "containerPort": 9400}]
    local = {"http": 1111, "status": 2222}
    env = [
        {"name": "INFERSCALE_PORT", "value": "9400"},
        {"name": "U", "value": "$(INFERSCALE_PORT)"},
    ]
    assert environment(local, ports=ports, env=env) == {"INFERSCALE_PORT": "2222", "U": "2222"}
    assert environment(local, ports=ports) == {"INFERSCALE_PORT": "1111"}
    env = [{"name": "OTHER", "value": "9400"}]
    assert environment(local, ports=ports, env=env)["OTHER"] == "9400"
