"""The operator process on a real API server: births, repairs, restarts, deletions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.integration.kube.api import Api
from tests.integration.kube.control_plane import ControlPlane, eventually
from tests.integration.kube.job_loop import ending_jobs, stay
from tests.integration.kube.operator_process import (
    SHORT_LEASE,
    OperatorProcess,
    running_operator,
    two_operators,
)
from tests.integration.kube.proxy import running_proxy
from tests.integration.kube.resources import facts, memory_store, personalized_model

STORE_CHILDREN = {
    "serviceaccounts": "m-encoder",
    "networkpolicies": "m-encoder",
    "persistentvolumeclaims": "m-store",
}
MODEL_CHILDREN = {
    "serviceaccounts": "p-server",
    "networkpolicies": "p-server",
    "services": "p",
    "poddisruptionbudgets": "p",
    "horizontalpodautoscalers": "p",
    "secrets": "p-api-key",
}


@pytest.fixture
def api(control_plane: ControlPlane, namespace: str) -> Api:
    return Api(control_plane.kubeconfig, namespace)


@pytest.fixture
def encoded(api: Api, control_plane: ControlPlane, tmp_path: Path) -> Any:
    """An operator that has encoded the store ``m``."""
    api.create("configmaps", facts())
    api.create("memorystores", memory_store("m"))
    with (
        running_operator(control_plane.kubeconfig, api.namespace, tmp_path) as operator,
        ending_jobs(api),
    ):
        ready(api, "memorystores", "m")
        yield operator


def ready(api: Api, plural: str, name: str, status: str = "True") -> None:
    eventually(
        lambda: api.condition(plural, name, "Ready").get("status") == status,
        f"{plural}/{name} has Ready={status}",
    )


def test_store_reaches_its_job_and_ready(api: Api, encoded: OperatorProcess) -> None:
    live = api.get("memorystores", "m")
    assert live is not None
    assert live["status"]["observedGeneration"] == live["metadata"]["generation"]
    assert live["status"]["facts"]["encoded"] == 2
    (job,) = api.list("jobs")
    assert job["metadata"]["ownerReferences"][0]["uid"] == live["metadata"]["uid"]
    assert (
        encoded.metric(
            "inferscale_resource_condition", name="m", namespace=api.namespace, type="Ready"
        )
        == 1.0
    )
    created = [item for item in encoded.records() if item.get("action") == "created"]
    assert {(item["kind"], item["namespace"]) for item in created} >= {("Job", api.namespace)}


def test_failed_job_shows_its_last_line(
    api: Api, control_plane: ControlPlane, tmp_path: Path
) -> None:
    api.create("configmaps", facts())
    api.create("memorystores", memory_store("m"))
    message = "facts.jsonl:1: field 'text' is missing"
    with (
        running_operator(control_plane.kubeconfig, api.namespace, tmp_path),
        ending_jobs(api, lambda _: (2, message)),
    ):
        ready(api, "memorystores", "m", "False")
        eventually(
            lambda: message in api.condition("memorystores", "m", "Ready").get("message", ""),
            "the condition shows the pod's last line",
        )


@pytest.mark.parametrize("plural", sorted(STORE_CHILDREN))
def test_deleted_child_of_a_store_comes_back(
    api: Api, encoded: OperatorProcess, plural: str
) -> None:
    before = api.get(plural, STORE_CHILDREN[plural])
    assert before is not None
    if plural == "persistentvolumeclaims":
        # Nothing protects claims here; in a cluster this one would wait for its pods.
        assert not before["metadata"].get("finalizers")
    api.delete(plural, STORE_CHILDREN[plural])

    def again() -> bool:
        live = api.get(plural, STORE_CHILDREN[plural])
        return live is not None and live["metadata"]["uid"] != before["metadata"]["uid"]

    eventually(again, f"{plural} is made again")


EDITS: dict[str, Any] = {
    "serviceaccounts": {"automountServiceAccountToken": True},
    "networkpolicies": {"spec": {"policyTypes": ["Egress"]}},
    "persistentvolumeclaims": {"metadata": {"labels": {"app.kubernetes.io/part-of": "other"}}},
    "services": {"spec": {"selector": {"inferscale.dev/owner": "other"}}},
    "poddisruptionbudgets": {"spec": {"maxUnavailable": 7}},
    "horizontalpodautoscalers": {"spec": {"maxReplicas": 99}},
}


@pytest.mark.parametrize("plural", sorted(STORE_CHILDREN))
def test_edited_child_of_a_store_is_repaired(
    api: Api, encoded: OperatorProcess, plural: str
) -> None:
    repaired(api, plural, STORE_CHILDREN[plural])


def repaired(api: Api, plural: str, name: str) -> None:
    before = api.get(plural, name)
    edited = api.patch(plural, name, EDITS[plural])
    assert before is not None
    assert unversioned(edited) != unversioned(before)
    eventually(
        lambda: unversioned(api.get(plural, name) or {}) == unversioned(before),
        f"{plural}/{name} is as before",
    )


def unversioned(manifest: dict[str, Any]) -> dict[str, Any]:
    metadata = manifest.get("metadata", {})
    return {
        "spec": manifest.get("spec"),
        "rest": manifest.get("automountServiceAccountToken"),
        "labels": metadata.get("labels"),
        "annotations": metadata.get("annotations"),
        "owners": metadata.get("ownerReferences"),
    }


def test_lost_labels_and_owner_are_put_back(api: Api, encoded: OperatorProcess) -> None:
    before = api.get("serviceaccounts", "m-encoder")
    assert before is not None
    labels = dict.fromkeys(before["metadata"]["labels"])
    api.patch("serviceaccounts", "m-encoder", {"metadata": {"labels": labels}})
    eventually(
        lambda: unversioned(api.get("serviceaccounts", "m-encoder") or {}) == unversioned(before),
        "the labels are back",
    )


def test_children_of_a_model_are_repaired(api: Api, encoded: OperatorProcess) -> None:
    spec = {
        "serving": {"replicas": 2},
        "auth": {"mode": "apiKey"},
        "autoscaling": {"provider": "hpa", "maxReplicas": 3},
    }
    api.create("personalizedmodels", personalized_model("p", "m", **spec))
    deployment = eventually(lambda: api.names("deployments"), "there is a Deployment").pop()
    serve(api, deployment)
    # An autoscaler is made for metrics that were seen; here no server runs that would show them.
    names = {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting"}
    api.patch(
        "personalizedmodels", "p", {"status": {"autoscaling": {"metricNames": names}}}, "status"
    )
    for plural, name in MODEL_CHILDREN.items():
        eventually(lambda p=plural, n=name: api.get(p, n), f"there is {plural}/{name}")
    for plural, name in MODEL_CHILDREN.items():
        if plural in EDITS:
            repaired(api, plural, name)
    for plural, name in (*MODEL_CHILDREN.items(), ("deployments", deployment)):
        if plural == "secrets":
            continue
        before = api.get(plural, name)
        assert before is not None
        api.delete(plural, name)
        eventually(
            lambda p=plural, n=name, b=before: (
                (api.get(p, n) or b)["metadata"]["uid"] != b["metadata"]["uid"]
            ),
            f"{plural}/{name} is made again",
        )
    for manifest in api.list("configmaps"):
        if manifest["metadata"]["name"].startswith("p-config-"):
            name = manifest["metadata"]["name"]
            api.patch("configmaps", name, {"data": {"config.json": "{}"}})
            eventually(
                lambda n=name, m=manifest: (
                    (api.get("configmaps", n) or {}).get("data") == m["data"]
                ),
                "the config is as before",
            )


def serve(api: Api, deployment: str) -> None:
    """Says what the Deployment controller would say once all pods are ready."""
    live = api.get("deployments", deployment)
    assert live is not None
    count = live["spec"].get("replicas", 1)
    status = {
        "observedGeneration": live["metadata"]["generation"],
        "replicas": count,
        "updatedReplicas": count,
        "readyReplicas": count,
        "availableReplicas": count,
    }
    api.patch("deployments", deployment, {"status": status}, "status")


def test_killed_operator_goes_on_where_it_was(
    api: Api, control_plane: ControlPlane, tmp_path: Path
) -> None:
    api.create("configmaps", facts())
    kubeconfig = control_plane.kubeconfig
    first = OperatorProcess(kubeconfig, api.namespace, tmp_path, *SHORT_LEASE)
    first.wait_for("acting")
    for number in range(5):
        api.create("memorystores", memory_store(f"m{number}"))
    eventually(lambda: api.names("jobs"), "the first Job is there")
    first.kill()
    with (
        running_operator(control_plane.kubeconfig, api.namespace, tmp_path),
        ending_jobs(api),
    ):
        for number in range(5):
            ready(api, "memorystores", f"m{number}")
    jobs = [name.rsplit("-", 2)[0] for name in api.names("jobs")]
    assert sorted(jobs) == [f"m{number}-encode" for number in range(5)]


def test_of_two_operators_one_acts_and_the_other_takes_over(
    api: Api, control_plane: ControlPlane, tmp_path: Path
) -> None:
    api.create("configmaps", facts())
    with two_operators(control_plane.kubeconfig, api.namespace, tmp_path) as (first, second):
        assert second.ask("/healthz")[0] == 200
        api.create("memorystores", memory_store("a"))
        eventually(lambda: api.names("jobs"), "the acting one made the Job")
        assert second.metric("inferscale_operator_reconciles_total") == 0
        first.kill()
        api.create("memorystores", memory_store("b"))
        eventually(lambda: len(api.names("jobs")) == 2, "the other one acts")
        assert second.metric("inferscale_operator_leader") == 1


def test_stopped_operator_releases_the_lease(
    api: Api, control_plane: ControlPlane, tmp_path: Path
) -> None:
    with running_operator(control_plane.kubeconfig, api.namespace, tmp_path) as operator:
        assert operator.stop() == 0
    (lease,) = api.list("leases")
    assert lease["spec"].get("holderIdentity", "") == ""


def test_operator_that_loses_the_lease_ends_at_once(
    api: Api, control_plane: ControlPlane, tmp_path: Path
) -> None:
    kubeconfig = control_plane.kubeconfig
    with running_operator(kubeconfig, api.namespace, tmp_path, *SHORT_LEASE) as operator:
        name = api.list("leases")[0]["metadata"]["name"]
        api.patch("leases", name, {"spec": {"holderIdentity": "someone-else"}})
        assert operator.process.wait(20) == 1


def test_object_of_someone_else_is_left_alone(
    api: Api, control_plane: ControlPlane, tmp_path: Path
) -> None:
    api.create("configmaps", facts())
    foreign = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "m-encoder", "labels": {"made": "by-hand"}},
    }
    before = api.create("serviceaccounts", foreign)
    api.create("memorystores", memory_store("m"))
    with running_operator(control_plane.kubeconfig, api.namespace, tmp_path) as operator:
        condition = eventually(
            lambda: (
                (item := api.condition("memorystores", "m", "Ready")).get("reason")
                == "OwnedByOther"
                and item
            ),
            "the condition names the object",
        )
        assert condition["status"] == "False"
        assert "ServiceAccount 'm-encoder'" in condition["message"]
        after = api.get("serviceaccounts", "m-encoder")
        assert after is not None
        assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
        assert operator.metric("inferscale_operator_errors_total", reason="OwnedByOther") >= 1
        api.delete("serviceaccounts", "m-encoder")
        eventually(
            lambda: (api.get("serviceaccounts", "m-encoder") or before)["metadata"]["uid"]
            != before["metadata"]["uid"],
            "it goes on when the object is gone",
        )


def test_deletion_erases_and_leaves_nothing(api: Api, encoded: OperatorProcess) -> None:
    api.delete("memorystores", "m")
    eventually(lambda: api.get("memorystores", "m") is None, "the store is gone")
    eventually(
        lambda: not encoded.metric("inferscale_resource_condition", name="m"),
        "its series are gone",
    )


def test_nothing_is_written_when_nothing_changed(
    api: Api, control_plane: ControlPlane, tmp_path: Path
) -> None:
    api.create("configmaps", facts())
    for number in range(3):
        api.create("memorystores", memory_store(f"m{number}"))
    with (
        running_proxy(control_plane.kubeconfig, tmp_path) as proxy,
        running_operator(
            proxy.kubeconfig,
            api.namespace,
            tmp_path,
            "--resync-seconds",
            "1",
            "--compare-seconds",
            "2",
        ) as operator,
    ):
        with ending_jobs(api):
            for number in range(3):
                ready(api, "memorystores", f"m{number}")
        settled = passes(operator)
        eventually(lambda: passes(operator) > settled + 6, "two more looks at everything")
        proxy.seen.clear()
        settled = passes(operator)
        eventually(lambda: passes(operator) >= settled + 15, "five more looks at everything")
        assert proxy.writes() == []


def passes(operator: OperatorProcess) -> float:
    return operator.metric("inferscale_operator_reconciles_total")


def test_a_running_job_costs_no_writes_either(
    api: Api, control_plane: ControlPlane, tmp_path: Path
) -> None:
    api.create("configmaps", facts())
    api.create("memorystores", memory_store("m"))
    with (
        running_proxy(control_plane.kubeconfig, tmp_path) as proxy,
        running_operator(
            proxy.kubeconfig, api.namespace, tmp_path, "--resync-seconds", "0.5"
        ) as operator,
        ending_jobs(api, stay),
    ):
        eventually(lambda: api.names("jobs"), "the Job is there")
        settled = passes(operator)
        eventually(lambda: passes(operator) > settled + 4, "some more looks")
        proxy.seen.clear()
        settled = passes(operator)
        eventually(lambda: passes(operator) >= settled + 6, "six more looks")
        assert proxy.writes() == []
