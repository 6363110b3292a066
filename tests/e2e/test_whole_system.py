"""The product as a cluster runs it: API server, operator process, encoder and server processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.e2e.prometheus import Prometheus, running_prometheus
from tests.e2e.routing import is_healthy, requests_of, running_on, running_router
from tests.e2e.system import Asking, Streaming, System, settled
from tests.integration.kube.control_plane import (
    ControlPlane,
    KubectlError,
    MissingControlPlane,
    environment,
    eventually,
    give_up,
    start,
)
from tests.integration.kube.operator_process import running_operator
from tests.integration.ports import free_port

ROOT = Path(__file__).parents[2]
STORE, MODEL = "memorystore/maya-memory", "personalizedmodel/maya-chat"
SERVERS = "inferscale.dev/owner=maya-chat,app.kubernetes.io/component=server"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    try:
        with start(tmp_path_factory.mktemp("system"), controllers=True) as plane:
            yield plane
    except MissingControlPlane as error:
        give_up(error)


@contextmanager
def running_node(plane: ControlPlane, namespace: str, data: Path) -> Iterator[int]:
    """The node process; its port leads to the Service."""
    port = free_port()
    log = data / "node.log"
    arguments = [str(plane.kubeconfig), namespace, str(data), "maya-chat", str(port)]
    # The built model is kept between runs: building it is not what this test is about.
    models = os.environ.get("INFERSCALE_MODEL_CACHE", str(ROOT / "build" / "models"))
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.node", *arguments],
            cwd=ROOT,
            env={**environment(), "INFERSCALE_MODEL_CACHE": models},
            stdout=stream,
            stderr=stream,
        )
    try:
        eventually(lambda: "node: ready" in log.read_text(), "the node is ready")
        yield port
    except BaseException:
        print(f"the node's log ends with:\n{log.read_text()[-8000:]}")
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _children(system: System) -> dict[str, str]:
    """Name to uid of everything that the operator made."""
    kinds = (
        "serviceaccounts,configmaps,persistentvolumeclaims,networkpolicies,jobs,deployments,"
        "services,poddisruptionbudgets,pods,roles,rolebindings"
    )
    listed = system.kubectl(
        "get", kinds, "-l", "app.kubernetes.io/managed-by=inferscale-operator", "-o", "json"
    )
    return {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["uid"]
        for item in json.loads(listed)["items"]
    }


def _add_fact(system: System) -> None:
    facts = system.get("configmap/maya-facts")["data"]["facts.jsonl"]
    line = {
        "kind": "fact",
        "user": "maya",
        "id": "f99",
        "text": "Maya has named her new sourdough starter Gustavo.",
    }
    patch = json.dumps({"data": {"facts.jsonl": facts.rstrip("\n") + "\n" + json.dumps(line)}})
    system.kubectl("patch", "configmap/maya-facts", "--type=merge", "-p", patch)


def test_from_apply_to_delete(plane: ControlPlane, tmp_path: Path) -> None:
    namespace = f"system-{uuid.uuid4().hex[:8]}"
    plane.kubectl("create", "namespace", namespace)
    with running_node(plane, namespace, tmp_path) as port:
        system = System(plane, namespace, port)
        with running_prometheus(tmp_path, system.targets) as prometheus:
            _lives(system, tmp_path, prometheus)


def _lives(system: System, folder: Path, prometheus: Prometheus) -> None:
    plane, namespace = system.plane, system.namespace
    with running_operator(plane.kubeconfig, namespace, folder) as system.operator:
        _comes_up(system)
        _changes_k_without_an_interruption(system)
        _takes_in_new_facts(system)
        before = _children(system)
        system.operator.kill()
    with running_operator(plane.kubeconfig, namespace, folder) as system.operator:
        _repairs_what_was_lost_meanwhile(system, before)
        _scales_by_itself(system, folder)
        prometheus.assert_everything_answers()
        _leaves_nothing(system, folder)


def _comes_up(system: System) -> None:
    system.kubectl("apply", "-f", str(ROOT / "examples" / "quickstart.yaml"))
    system.wait_ready(STORE)
    system.kubectl("wait", "--for=condition=Ready", "--timeout=10s", STORE)
    assert system.get(STORE)["status"]["facts"]["summary"] == "76/76"
    system.wait_ready(MODEL)
    memory = system.ask("What is my dog called?")["usage"]["memory"]
    assert memory["mode"] == "injected"
    assert memory["facts"] == 20
    table = system.kubectl("get", "memorystores,personalizedmodels")
    assert "76/76" in table
    assert "True" in table


def _servers(system: System) -> set[str]:
    return set(system.kubectl("get", "pods", "-l", SERVERS, "-o", "name").split())


def _changes_k_without_an_interruption(system: System) -> None:
    generation = system.get(MODEL)["metadata"]["generation"]
    old, before = _servers(system), system.pods("server")
    with Asking(system) as asking:
        patch = json.dumps({"spec": {"retrieval": {"topK": 5}}})
        system.kubectl("patch", MODEL, "--type=merge", "-p", patch)
        settled(lambda: _listening(system, without=before), "a new server listens", 600)
        # Long streams only now: all the time they would take the new server's cores.
        with Streaming(system, 120) as streaming:
            eventually(lambda: any(map(running_on, before.values())), "a stream on an old server")
            system.wait_ready(MODEL, generation=generation + 1)
            settled(lambda: not old & _servers(system), "the old pods drain and go", 300)
        system.ask("What is my dog called?")
    assert asking.failures + streaming.failures == []
    assert asking.answers > 1
    assert streaming.answers > 0
    assert system.ask("What is my dog called?")["usage"]["memory"]["facts"] == 5


def _listening(system: System, *, without: Collection[str]) -> bool:
    """Whether a server other than these answers its health check."""
    new = [port for name, port in system.pods("server").items() if name not in without]
    return any(map(is_healthy, new))


def _takes_in_new_facts(system: System) -> None:
    deployments = {item["metadata"]["uid"] for item in system.items("deployments")}
    _add_fact(system)
    settled(lambda: system.get(STORE)["status"]["facts"]["summary"] == "77/77", "77 facts", 300)
    memory = system.ask("What is my sourdough starter called?", k=1)["usage"]["memory"]
    assert (memory["mode"], memory["facts"], memory["text_tokens"]) == ("injected", 1, 0)
    # New facts are no reason to start servers again.
    assert {item["metadata"]["uid"] for item in system.items("deployments")} == deployments


def _repairs_what_was_lost_meanwhile(system: System, before: dict[str, str]) -> None:
    system.kubectl("delete", "service/maya-chat")
    settled(lambda: "Service/maya-chat" in _children(system), "the Service is back")
    after = _children(system)
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name]] == ["Service/maya-chat"]
    system.wait_ready(MODEL)
    assert system.ask("What is my dog called?")["usage"]["memory"]["mode"] == "injected"


def _replicas(system: System) -> int:
    return int(system.get(MODEL)["spec"]["serving"]["replicas"])


def _writers_of_the_size(system: System) -> set[str]:
    return {
        entry["manager"]
        for entry in system.get_with_managers(MODEL)
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {}).get("f:serving", {})
    }


def _autoscale(system: System, *, down_seconds: int, idle_seconds: int) -> None:
    scaling = {
        "provider": "operator",
        "maxReplicas": 2,
        "target": {"requests": 2},
        "behavior": {"downSeconds": down_seconds},
        "scaleToZero": {"idleSeconds": idle_seconds},
    }
    patch = json.dumps({"spec": {"autoscaling": scaling}})
    system.kubectl("patch", MODEL, "--type=merge", "-p", patch)


def _scales_by_itself(system: System, folder: Path) -> None:
    """1 -> 2 -> 0 -> 1: the operator by the load, the activator by the request that wakes."""
    _autoscale(system, down_seconds=3600, idle_seconds=3600)
    with Asking(system) as asking:
        with ExitStack() as stack:
            load = [stack.enter_context(Streaming(system, 64)) for _ in range(4)]
            settled(lambda: _replicas(system) == 2, "the load asks for two", 300)
        settled(lambda: system.get(MODEL)["status"].get("readyReplicas") == 2, "two are ready", 600)
        assert "PodDisruptionBudget/maya-chat" in _children(system)
    # The size belongs to whoever scaled, never to the manager of the children.
    assert _writers_of_the_size(system) == {"inferscale-operator-scale"}
    assert [failure for one in (asking, *load) for failure in one.failures] == []
    assert min(one.answers for one in load) > 0
    _routes_a_user_to_one_server(system, folder)
    _autoscale(system, down_seconds=5, idle_seconds=10)
    settled(lambda: not _servers(system), "nobody asks, and no server is left", 300)
    status = system.get(MODEL)["status"]
    conditions = {item["type"]: item for item in status["conditions"]}
    assert conditions["ServerAvailable"]["reason"] == "Asleep"
    assert conditions["MetricsAvailable"]["status"] == "True"
    assert status["autoscaling"]["coldStartSeconds"] > 0
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(system.ask, "What is my dog called?") for _ in range(2)]
        answers = [answer.result() for answer in asked]
    assert {answer["usage"]["memory"]["mode"] for answer in answers} == {"injected"}
    # The API server forgets who wrote a size of 0, so afterwards it may be nobody's.
    assert _writers_of_the_size(system) <= {"inferscale-activator", "inferscale-operator-scale"}
    system.wait_ready(MODEL)
    assert _replicas(system) >= 1
    reasons = {item["reason"] for item in system.items("events")}
    assert {"Scaled", "FellAsleep"} <= reasons


def _routes_a_user_to_one_server(system: System, folder: Path) -> None:
    servers = [*system.pods("server").values()]
    assert len(servers) == 2
    port = free_port()
    with running_router(servers, port, folder):
        for user in ("maya", "nobody"):
            before = [requests_of(server) for server in servers]
            answers = [system.ask("Hi", port=port, tokens=1, user=user) for _ in range(3)]
            more = [requests_of(s) - b for s, b in zip(servers, before, strict=True)]
            assert sorted(more) == [0, 3]
            mode = "injected" if user == "maya" else "none"
            assert {item["usage"]["memory"]["mode"] for item in answers} == {mode}


def _leaves_nothing(system: System, data: Path) -> None:
    volumes = data / "volumes" / system.namespace
    assert any(volumes.rglob("*.safetensors"))
    system.kubectl("delete", MODEL, STORE, "--wait=true", "--timeout=100s")
    settled(lambda: not _children(system), "all children are gone", 120)
    assert not list(volumes.rglob("*"))
    reasons = {item["reason"] for item in system.items("events")}
    assert "Erased" in reasons
    with pytest.raises(KubectlError, match="NotFound"):
        system.get(STORE)
    text = json.dumps(system.items("events"))
    assert "Biscuit" not in text  # no fact in any Event
