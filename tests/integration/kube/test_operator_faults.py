"""The operator behind a proxy that misbehaves: every fault heals, none repeats work for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.kube.api import Api
from tests.integration.kube.control_plane import ControlPlane, eventually
from tests.integration.kube.job_loop import ending_jobs
from tests.integration.kube.operator_process import running_operator, two_operators
from tests.integration.kube.proxy import Fault, Proxy, running_proxy
from tests.integration.kube.resources import facts, memory_store


@pytest.fixture
def api(control_plane: ControlPlane, namespace: str) -> Api:
    return Api(control_plane.kubeconfig, namespace)


@pytest.fixture
def proxy(control_plane: ControlPlane, tmp_path: Path) -> Iterator[Proxy]:
    with running_proxy(control_plane.kubeconfig, tmp_path) as running:
        yield running


def ready(api: Api, name: str) -> None:
    eventually(
        lambda: api.condition("memorystores", name, "Ready").get("status") == "True",
        f"{name} is ready",
    )


FAULTS = {
    "409 at the status": Fault("PATCH", "/memorystores/m/status", code=409, times=2),
    "409 at an apply": Fault("PATCH", "/serviceaccounts/", code=409, times=2),
    "409 at the finalizer": Fault("PATCH", r"/memorystores/m\?", code=409, times=2),
    "422 at the status": Fault("PATCH", "/memorystores/m/status", code=422, times=2),
    "422 at the Job": Fault("POST", "/jobs", code=422, times=2),
    "429 with Retry-After": Fault("POST", "/jobs", code=429, headers={"Retry-After": "1"}, times=2),
    "500 at every kind of write": Fault("POST|PATCH", "/m-|/jobs|/status", code=500, times=4),
    "500 at reads": Fault("GET", "/memorystores/m$", code=500, times=3),
    "500 at the first lists": Fault("GET", r"/jobs\?", code=500, times=3),
    "403 at the claim": Fault("PATCH", "/persistentvolumeclaims/", code=403, times=1),
    "slow answers": Fault("GET|POST|PATCH", "/namespaces/", delay=0.3, times=30),
    "cut before the server": Fault("POST|PATCH", "/jobs|/status|/m-", cut=True, times=3),
    "answer to the Job lost": Fault("POST", "/jobs", cut=True, after=True),
    "answer to the status lost": Fault("PATCH", "/status", cut=True, after=True),
    "answer to the finalizer lost": Fault("PATCH", r"/memorystores/m\?", cut=True, after=True),
    "410 at the watches": Fault("GET", "watch=true", code=410, times=8),
    "500 at the watches": Fault("GET", "watch=true", code=500, times=8),
    "cut watches": Fault("GET", "watch=true", cut=True, times=8),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_heals(
    api: Api, control_plane: ControlPlane, proxy: Proxy, tmp_path: Path, name: str
) -> None:
    fault = FAULTS[name]
    proxy.faults.append(fault)
    api.create("configmaps", facts())
    api.create("memorystores", memory_store("m"))
    with running_operator(proxy.kubeconfig, api.namespace, tmp_path) as operator:
        with ending_jobs(api):
            ready(api, "m")
        assert fault.hits > 0
        assert len(api.names("jobs")) == 1
        assert operator.ask("/healthz")[0] == 200
        broken = [item for item in operator.records() if item.get("action") == "broken"]
        assert broken == []


def test_list_that_expires_in_the_middle_starts_again(
    api: Api, proxy: Proxy, tmp_path: Path
) -> None:
    fault = Fault("GET", r"/configmaps\?.*continue=", code=410, times=1)
    proxy.faults.append(fault)
    labels = {
        "app.kubernetes.io/managed-by": "inferscale-operator",
        "inferscale.dev/owner-kind": "MemoryStore",
        "inferscale.dev/owner": "nobody",
    }
    count = 501
    for number in range(count):
        body = {"metadata": {"name": f"c{number}", "labels": labels}}
        api.create("configmaps", body)
    with running_operator(proxy.kubeconfig, api.namespace, tmp_path) as operator:
        assert fault.hits == 1
        assert operator.metric("inferscale_operator_cached_children") == count


def test_silent_watch_is_found_out_and_healed(
    api: Api, control_plane: ControlPlane, proxy: Proxy, tmp_path: Path
) -> None:
    api.create("configmaps", facts())
    with running_operator(
        proxy.kubeconfig, api.namespace, tmp_path, "--compare-seconds", "1"
    ) as operator:
        proxy.frozen = True
        api.create("memorystores", memory_store("m"))
        eventually(lambda: api.names("jobs"), "a list told of the store")
        eventually(lambda: "started anew" in operator.text(), "watching was started anew")
        api.create("memorystores", memory_store("n"))
        eventually(
            lambda: operator.ask("/healthz")[0] == 503, "liveness fails while watches stay silent"
        )
        assert "MemoryStore" in operator.ask("/healthz")[1]
        assert operator.stop() == 0
    proxy.frozen = False
    with (
        running_operator(proxy.kubeconfig, api.namespace, tmp_path) as again,
        ending_jobs(api),
    ):
        ready(api, "m")
        ready(api, "n")
        assert again.ask("/healthz")[0] == 200


def test_missed_deletion_is_found_by_a_list(
    api: Api, control_plane: ControlPlane, proxy: Proxy, tmp_path: Path
) -> None:
    api.create("configmaps", facts())
    api.create("memorystores", memory_store("m"))
    with running_operator(proxy.kubeconfig, api.namespace, tmp_path, "--compare-seconds", "1"):
        before = eventually(lambda: api.get("serviceaccounts", "m-encoder"), "the account is there")
        proxy.frozen = True
        api.delete("serviceaccounts", "m-encoder")
        eventually(
            lambda: (api.get("serviceaccounts", "m-encoder") or before)["metadata"]["uid"]
            != before["metadata"]["uid"],
            "the account is made again",
        )


def test_deletion_while_the_watches_begin_is_found_soon(
    api: Api, proxy: Proxy, tmp_path: Path
) -> None:
    """With the usual pause between comparisons, which is longer than this test waits."""
    api.create("configmaps", facts())
    api.create("memorystores", memory_store("m"))
    with running_operator(proxy.kubeconfig, api.namespace, tmp_path) as operator:
        before = eventually(lambda: api.get("serviceaccounts", "m-encoder"), "the account is there")
        assert operator.stop() == 0
    proxy.frozen = True
    with running_operator(proxy.kubeconfig, api.namespace, tmp_path) as operator:
        api.delete("serviceaccounts", "m-encoder")
        eventually(
            lambda: (api.get("serviceaccounts", "m-encoder") or before)["metadata"]["uid"]
            != before["metadata"]["uid"],
            "the account is made again",
        )
        # A watch that has told nothing yet may be slow: it is not started anew so soon.
        assert "started anew" not in operator.text()


def test_suspended_operator_does_no_harm_when_it_comes_back(
    api: Api, control_plane: ControlPlane, tmp_path: Path
) -> None:
    api.create("configmaps", facts())
    with two_operators(control_plane.kubeconfig, api.namespace, tmp_path) as (first, second):
        first.process.send_signal(signal.SIGSTOP)
        try:
            second.wait_for("acting")
            api.create("memorystores", memory_store("m"))
            eventually(lambda: api.names("jobs"), "the second one acts")
        finally:
            os.kill(first.process.pid, signal.SIGCONT)
        assert first.process.wait(20) == 1
        assert second.ask("/healthz")[0] == 200
