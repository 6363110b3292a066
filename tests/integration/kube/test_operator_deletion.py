"""Deletions with a real garbage collector and namespace controller."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.integration.kube.api import MERGE, Api
from tests.integration.kube.control_plane import ControlPlane, eventually
from tests.integration.kube.job_loop import REPORT, End, ending_jobs
from tests.integration.kube.operator_process import running_operator
from tests.integration.kube.resources import facts, memory_store


@pytest.fixture
def api(controlled_plane: ControlPlane, controlled_namespace: str) -> Api:
    return Api(controlled_plane.kubeconfig, controlled_namespace)


@pytest.fixture
def flags() -> tuple[str, ...]:
    # A lease in the namespace that is deleted would be deleted with it.
    return ("--lease-namespace", "default", "--lease-name", f"test-{uuid.uuid4().hex[:8]}")


def encoded(api: Api) -> None:
    api.create("configmaps", facts())
    api.create("memorystores", memory_store("m"))
    eventually(
        lambda: api.condition("memorystores", "m", "Ready").get("status") == "True", "m is ready"
    )


def end(job: dict[str, Any]) -> End:
    return 0, json.dumps(REPORT if "encode" in job["metadata"]["name"] else {"files": 1})


@pytest.mark.parametrize("policy", ["Background", "Foreground"])
def test_resource_and_children_go(
    api: Api,
    controlled_plane: ControlPlane,
    tmp_path: Path,
    flags: tuple[str, ...],
    policy: str,
) -> None:
    with (
        running_operator(controlled_plane.kubeconfig, api.namespace, tmp_path, *flags),
        ending_jobs(api, end),
    ):
        encoded(api)
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy}
        api.request("DELETE", api.path("memorystores", "m"), options)
        eventually(lambda: api.get("memorystores", "m") is None, "the store is gone")
        for plural in ("serviceaccounts", "networkpolicies", "persistentvolumeclaims"):
            eventually(
                lambda kind=plural: not [name for name in api.names(kind) if name[:2] == "m-"],
                f"{plural} are gone",
            )
        assert api.names("memorystores") == set()


HOLD = "test.inferscale.dev/hold"


def held_namespace(plane: ControlPlane) -> Api:
    """A namespace that terminates as in a real cluster.

    The test API server sets no ``spec.finalizers`` and does not wait for them; a finalizer in the
    metadata makes it wait, and the namespace controller does the rest.
    """
    name = f"test-{uuid.uuid4().hex[:10]}"
    api = Api(plane.kubeconfig, name)
    body = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "finalizers": [HOLD]},
        "spec": {"finalizers": ["kubernetes"]},
    }
    api.request("POST", "/api/v1/namespaces", body)
    return api


def test_namespace_goes_also_when_the_operator_comes_back_late(
    controlled_plane: ControlPlane, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    api = held_namespace(controlled_plane)
    place = f"/api/v1/namespaces/{api.namespace}"
    with (
        running_operator(controlled_plane.kubeconfig, api.namespace, tmp_path, *flags) as first,
        ending_jobs(api, end),
    ):
        encoded(api)
        first.kill()
    api.request("DELETE", place)
    eventually(
        lambda: (api.get("memorystores", "m") or {}).get("metadata", {}).get("deletionTimestamp"),
        "the store waits for its finalizer",
    )
    with running_operator(controlled_plane.kubeconfig, api.namespace, tmp_path, *flags):
        eventually(lambda: api.get("memorystores", "m") is None, "the store is gone")

    def emptied() -> bool:
        conditions = api.request("GET", place).get("status", {}).get("conditions", [])
        return ("NamespaceContentRemaining", "False") in [
            (item["type"], item["status"]) for item in conditions
        ]

    eventually(emptied, "nothing is left in the namespace")
    api.request("PATCH", place, {"metadata": {"finalizers": None}}, MERGE)
