"""A namespace of the whole system as a person uses it, and clients that ask all the time."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tests.e2e.prometheus import Target
from tests.integration.kube.control_plane import ControlPlane, eventually
from tests.integration.kube.operator_process import OperatorProcess

from inferscale_operator.desired.paths import PORTS_ANNOTATION

_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def settled(check: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """``eventually`` for what kubectl is asked: each look costs a tenth of a second of a core."""
    return eventually(check, what, seconds, pause=1.0)


class System:
    """A namespace with the quickstart in it, and what a person does with it."""

    def __init__(self, plane: ControlPlane, namespace: str, port: int) -> None:
        self.plane = plane
        self.namespace = namespace
        self.port = port
        self.operator: OperatorProcess | None = None

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.plane.kubectl(*arguments, stdin=stdin, namespace=self.namespace)

    def get(self, what: str) -> dict[str, Any]:
        return dict(json.loads(self.kubectl("get", what, "-o", "json")))

    def get_with_managers(self, what: str) -> list[dict[str, Any]]:
        """Who wrote which fields."""
        text = self.kubectl("get", what, "-o", "json", "--show-managed-fields")
        return list(json.loads(text)["metadata"]["managedFields"])

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

        settled(ready, f"{what} is ready", 600)

    def pods(self, *components: str) -> dict[str, int]:
        """Port for metrics of each running pod of these components, by name."""
        found = {}
        for pod in self.items("pods"):
            ports = json.loads(
                (pod["metadata"].get("annotations") or {}).get(PORTS_ANNOTATION, "{}")
            )
            number = ports.get("http", ports.get("status"))
            running = (pod.get("status") or {}).get("phase") == "Running"
            labels = pod["metadata"].get("labels") or {}
            if number and running and labels.get("app.kubernetes.io/component") in components:
                found[pod["metadata"]["name"]] = int(number)
        return found

    def targets(self) -> list[Target]:
        """What a Prometheus scrapes, with the labels that every configuration sets."""
        pods = self.pods("server", "encoder", "activator")
        found = [
            (f"127.0.0.1:{number}", {"namespace": self.namespace, "pod": name})
            for name, number in pods.items()
        ]
        if self.operator is not None and self.operator.process.poll() is None:
            labels = {"namespace": "operator", "pod": f"operator-{self.operator.port}"}
            found.append((f"127.0.0.1:{self.operator.port}", labels))
        return found

    def ask(
        self, question: str, *, port: int | None = None, tokens: int = 8, **memory: Any
    ) -> dict[str, Any]:
        """One chat request through the Service, or through another port."""
        return dict(json.loads(self.post(question, memory, port=port, max_tokens=tokens)))

    def post(
        self, question: str, memory: dict[str, Any], *, port: int | None = None, **fields: Any
    ) -> bytes:
        """The body of the answer to one chat request."""
        body = {
            "model": "maya-chat",
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "memory": {"user": "maya", **memory},
            **fields,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port or self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-user-id": body["memory"]["user"]},
        )
        # A request that wakes a model waits for its start.
        with _OPEN.open(request, timeout=600) as answer:
            return bytes(answer.read())


class Asking:
    """Asks again and again in the background; keeps what went wrong."""

    def __init__(self, system: System, pause: float = 2.0) -> None:
        self._system = system
        self._pause = pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers = 0
        self.failures: list[str] = []

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._ask()
                self.answers += 1
            except Exception as error:  # whatever it is, somebody got no answer
                self.failures.append(f"{datetime.now(UTC):%H:%M:%S} {error!r}")
            self._stop.wait(self._pause)

    def _ask(self) -> None:
        answer = self._system.ask("What is my dog called?")
        assert answer["usage"]["memory"]["mode"] == "injected", answer["usage"]

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Streaming(Asking):
    """Long streams, one after the other: each must bring all of its tokens and a proper end."""

    def __init__(self, system: System, tokens: int) -> None:
        super().__init__(system, pause=0)
        self._tokens = tokens

    def _ask(self) -> None:
        data = self._system.post(
            "Tell me a long story about my dog.",
            {},
            max_tokens=self._tokens,
            ignore_eos=True,
            stream=True,
            stream_options={"include_usage": True},
        )
        lines = [line for line in data.decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]", lines[-1]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert [end for end in ends if end] == ["length"]
        assert chunks[-1]["usage"]["completion_tokens"] == self._tokens
