"""The scale subresource of a real API server, between the operator, its activator and others."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.integration.kube.api import Api
from tests.integration.kube.control_plane import ControlPlane, environment, eventually
from tests.integration.kube.resources import personalized_model
from tests.integration.ports import free_port

from inferscale_operator.cluster.client import SCALE_MANAGER, ApiCluster
from inferscale_operator.cluster.errors import ConflictError
from inferscale_operator.cluster.transport import Transport, load_configuration
from inferscale_operator.desired.kinds import PERSONALIZED_MODEL

# The certificate of a throw-away API server is its own.
pytestmark = pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture
def api(control_plane: ControlPlane, namespace: str) -> Api:
    return Api(control_plane.kubeconfig, namespace)


def sleeping(api: Api) -> None:
    """A model with 0 replicas that may sleep."""
    model = personalized_model(
        "m", "s", serving={"replicas": 0}, autoscaling={"provider": "none", "scaleToZero": {}}
    )
    api.create("personalizedmodels", model)


def replicas(api: Api) -> int:
    return int((api.get("personalizedmodels", "m") or {})["spec"]["serving"]["replicas"])


def writers(control_plane: ControlPlane, namespace: str) -> set[str]:
    """Field managers that own the size."""
    text = control_plane.kubectl(
        "get", "pmodel/m", "-o", "json", "--show-managed-fields", namespace=namespace
    )
    return {
        entry["manager"]
        for entry in json.loads(text)["metadata"]["managedFields"]
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {}).get("f:serving", {})
    }


def test_the_operator_scales_the_version_it_saw_and_under_its_own_name(
    api: Api, control_plane: ControlPlane, namespace: str
) -> None:
    sleeping(api)

    async def scale() -> None:
        transport = Transport(await load_configuration(str(control_plane.kubeconfig), None))
        cluster = ApiCluster(transport)
        try:
            seen = await cluster.get(PERSONALIZED_MODEL, namespace, "m")
            assert seen is not None
            await cluster.scale(seen, 2)
            # An autoscaler, or a person, may have written in the meantime.
            with pytest.raises(ConflictError):
                await cluster.scale(seen, 3)
        finally:
            await cluster.close()
            await transport.close()

    asyncio.run(scale())
    assert replicas(api) == 2
    assert writers(control_plane, namespace) == {SCALE_MANAGER}


class Server(BaseHTTPRequestHandler):
    """A model server that becomes ready when it is told to."""

    ready = threading.Event()

    def do_GET(self) -> None:
        self._answer(200 if self.ready.is_set() else 503, b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, body[::-1])

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def activator(kubeconfig: Path, namespace: str, target: str, folder: Path) -> Iterator[str]:
    """The process; yields its URL."""
    port = free_port()
    place = ["--name", "m", "--namespace", namespace, "--host", "127.0.0.1", "--port", str(port)]
    how = ["--target", target, "--kubeconfig", str(kubeconfig), "--log-format", "text"]
    log = folder / "activator.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferscale_operator.main", "activator", *place, *how],
            env=environment(),
            stdout=stream,
            stderr=stream,
        )
    try:
        eventually(lambda: "is up" in log.read_text(), "the activator is up")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        assert "secret question" not in log.read_text()


def test_a_request_wakes_a_model_and_is_answered_when_a_server_is_ready(
    api: Api, control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    sleeping(api)
    Server.ready.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    target = f"http://127.0.0.1:{server.server_port}"
    answers: list[bytes] = []

    def ask(url: str) -> None:
        request = urllib.request.Request(f"{url}/v1/chat/completions", b"secret question")
        with _OPEN.open(request, timeout=60) as answer:
            answers.append(answer.read())

    with activator(control_plane.kubeconfig, namespace, target, tmp_path) as url:
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        eventually(lambda: replicas(api) == 1, "the model is woken")
        with _OPEN.open(f"{url}/inferscale/v1/status", timeout=10) as status:
            assert json.loads(status.read()) == {"held": 1}
        assert answers == []
        Server.ready.set()
        asking.join(60)
        assert answers == [b"secret question"[::-1]]
        # A size that is not 0 is somebody else's business.
        api.patch("personalizedmodels", "m", {"spec": {"serving": {"replicas": 4}}})
        ask(url)
        assert replicas(api) == 4
    server.shutdown()
