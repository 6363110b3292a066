"""The product as a cluster runs it: API server, operator process, encoder and server processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
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
SERVERS = "inferscale.dev/owner=maya-chat"
_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    try:
        with start(tmp_path_factory.mktemp("system"), controllers=True) as plane:
            yield plane
    except MissingControlPlane as error:
        give_up(error)


class System:
    """A namespace with the quickstart in it, and what a person does with it."""

    def __init__(self, plane: ControlPlane, namespace: str, port: int) -> None:
        self.plane = plane
        self.namespace = namespace
        self.port = port

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.plane.kubectl(*arguments, stdin=stdin, namespace=self.namespace)

    def get(self, what: str) -> dict[str, Any]:
        return dict(json.loads(self.kubectl("get", what, "-o", "json")))

    def items(self, kind: str) -> list[dict[str, Any]]:
        return list(self.get(kind)["items"])

    def wait_ready(self, what: str, *, generation: int = 0) -> None:
        """As a person waits; the condition must be about the present spec."""

        def ready() -> bool:
            live = self.get(what)
            wanted = max(generation, live["metadata"]["generation"])
            return any(
                item["type"] == "Ready"
                and item["status"] == "True"
                and item["observedGeneration"] >= wanted
                for item in live.get("status", {}).get("conditions", [])
            )

        eventually(ready, f"{what} is ready", 600)

    def ask(self, question: str, **memory: Any) -> dict[str, Any]:
        """One chat request through the Service."""
        body = {
            "model": "maya-chat",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 8,
            "temperature": 0,
            "memory": {"user": "maya", **memory},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with _OPEN.open(request, timeout=120) as answer:
            return dict(json.loads(answer.read()))


class Asking:
    """Asks again and again in the background; keeps what went wrong."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers = 0
        self.failures: list[str] = []

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                answer = self._system.ask("What is my dog called?")
                assert answer["usage"]["memory"]["mode"] == "injected", answer["usage"]
                self.answers += 1
            except (OSError, AssertionError) as error:
                self.failures.append(f"{datetime.now(UTC):%H:%M:%S} {error!r}")
            self._stop.wait(1)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


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
        "services,poddisruptionbudgets,pods"
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
        with running_operator(plane.kubeconfig, namespace, tmp_path) as operator:
            _comes_up(system)
            _changes_k_without_an_interruption(system)
            _takes_in_new_facts(system)
            before = _children(system)
            operator.kill()
        with running_operator(plane.kubeconfig, namespace, tmp_path):
            _repairs_what_was_lost_meanwhile(system, before)
            _scales(system)
            _leaves_nothing(system, tmp_path)


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
    old = _servers(system)
    with Asking(system) as asking:
        patch = json.dumps({"spec": {"retrieval": {"topK": 5}}})
        system.kubectl("patch", MODEL, "--type=merge", "-p", patch)
        system.wait_ready(MODEL, generation=generation + 1)
        system.ask("What is my dog called?")
    assert asking.failures == []
    assert asking.answers > 1
    assert system.ask("What is my dog called?")["usage"]["memory"]["facts"] == 5
    eventually(lambda: not old & _servers(system), "the old pods have drained and gone", 120)


def _takes_in_new_facts(system: System) -> None:
    deployments = {item["metadata"]["uid"] for item in system.items("deployments")}
    _add_fact(system)
    eventually(lambda: system.get(STORE)["status"]["facts"]["summary"] == "77/77", "77 facts", 300)
    memory = system.ask("What is my sourdough starter called?", k=1)["usage"]["memory"]
    assert (memory["mode"], memory["facts"], memory["text_tokens"]) == ("injected", 1, 0)
    # New facts are no reason to start servers again.
    assert {item["metadata"]["uid"] for item in system.items("deployments")} == deployments


def _repairs_what_was_lost_meanwhile(system: System, before: dict[str, str]) -> None:
    system.kubectl("delete", "service/maya-chat")
    eventually(lambda: "Service/maya-chat" in _children(system), "the Service is back")
    after = _children(system)
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name]] == ["Service/maya-chat"]
    system.wait_ready(MODEL)
    assert system.ask("What is my dog called?")["usage"]["memory"]["mode"] == "injected"


def _scales(system: System) -> None:
    with Asking(system) as asking:
        system.kubectl("scale", MODEL, "--replicas=2")
        eventually(
            lambda: system.get(MODEL)["status"].get("readyReplicas") == 2, "two are ready", 600
        )
        assert "PodDisruptionBudget/maya-chat" in _children(system)
        system.kubectl("scale", MODEL, "--replicas=1")
        eventually(lambda: len(_servers(system)) == 1, "one is left", 300)
    assert asking.failures == []
    system.wait_ready(MODEL)


def _leaves_nothing(system: System, data: Path) -> None:
    volumes = data / "volumes" / system.namespace
    assert any(volumes.rglob("*.safetensors"))
    system.kubectl("delete", MODEL, STORE, "--wait=true", "--timeout=100s")
    eventually(lambda: not _children(system), "all children are gone", 120)
    assert not list(volumes.rglob("*"))
    reasons = {item["reason"] for item in system.items("events")}
    assert "Erased" in reasons
    with pytest.raises(KubectlError, match="NotFound"):
        system.get(STORE)
    text = json.dumps(system.items("events"))
    assert "Biscuit" not in text  # no fact in any Event
