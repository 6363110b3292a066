"""The real router with the operator's own arguments, over pods of a real API server.

The pods are objects whose status the test writes; behind their addresses (127.0.0.N) are small
servers that say who they are.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.integration.kube.api import Api
from tests.integration.kube.control_plane import BIN, ControlPlane, environment, eventually

from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.router import build_router
from inferscale_operator.desired.selection import generation_selector

pytestmark = [
    pytest.mark.skipif(
        shutil.which("vllm-router", path=str(BIN)) is None,
        reason="vllm-router has no wheel for this machine",
    ),
    # The certificate of a throw-away API server is its own.
    pytest.mark.filterwarnings("ignore:Unverified HTTPS request"),
]

STUB = Path(__file__).with_name("stub_server.py")
USERS = [f"resident-{number}" for number in range(200)]
GENERATION = "0a1b2c3d4e"


def _free_port() -> int:
    with socket.socket() as probe:
        # On all addresses of the loopback: the servers have one each.
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


class Fleet:
    """Servers, their pods, and a router before them."""

    def __init__(self, api: Api, kubeconfig: Path, log: Path) -> None:
        self._api = api
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{_free_port()}"
        self.owner = {
            "apiVersion": "inferscale.dev/v1alpha1",
            "kind": "PersonalizedModel",
            "metadata": {"name": "chat", "namespace": api.namespace, "uid": "u"},
        }
        self.log = log
        with log.open("wb") as output:
            self.router = subprocess.Popen(
                self._command(),
                env={**environment(), **self._variables, "KUBECONFIG": str(kubeconfig)},
                stdout=output,
                stderr=output,
            )

    def _command(self) -> list[str]:
        spec = PersonalizedModelSpec.model_validate(
            {
                "model": {"id": "m"},
                "memoryStores": [{"name": "s"}],
                "routing": {"provider": "vllm-router"},
            }
        )
        (deployment,) = build_router(self.owner, spec, Defaults("image"), GENERATION)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        self._variables = {item["name"]: item["value"] for item in container["env"]}
        words = [*container["command"], *container["args"]]
        for flag, value in (
            ("--port", self.url.rpartition(":")[2]),
            ("--prometheus-port", str(_free_port())),
            ("--service-discovery-port", str(self._port)),
        ):
            words[words.index(flag) + 1] = value
        return [str(BIN / words[0]), *words[1:]]

    def start_server(self, number: int) -> str:
        """A server and its ready pod; its address."""
        address = f"127.0.0.{number}"
        command = [sys.executable, str(STUB), address, str(self._port)]
        self._servers[address] = subprocess.Popen(command, env=dict(os.environ))

        def listens() -> bool:
            try:
                socket.create_connection((address, self._port), 1).close()
            except OSError:
                return False
            return True

        eventually(listens, f"{address} listens")
        labels = generation_selector(self.owner, GENERATION)
        spec = {"containers": [{"name": "serve", "image": "i"}]}
        name = f"server-{number}"
        # A deleted pod stays until it has ended, as with a kubelet.
        metadata = {"name": name, "labels": labels, "finalizers": ["inferscale.dev/kubelet"]}
        self._api.create("pods", {"metadata": metadata, "spec": spec})
        ready = {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        self._api.patch("pods", name, {"status": {**status, "conditions": [ready]}}, "status")
        return address

    def kill_server(self, address: str) -> None:
        self._servers[address].kill()
        self._servers[address].wait()

    def stop(self) -> None:
        for process in (self.router, *self._servers.values()):
            process.kill()
            process.wait()

    async def workers(self, session: aiohttp.ClientSession, count: int) -> None:
        """Waits until the router knows so many healthy servers."""
        for _ in range(600):
            try:
                async with session.get(f"{self.url}/readiness") as answer:
                    if (await answer.json()).get("healthy_workers", 0) == count:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
        raise AssertionError(f"the router does not know {count} servers: {self.log.read_text()}")

    async def ask(
        self, session: aiohttp.ClientSession, user: str, **fields: Any
    ) -> tuple[int, dict[str, Any]]:
        body = {
            "model": "chat",
            "messages": [{"role": "user", "content": "What is my dog called?"}],
            "memory": {"user": user, "k": 3},
            **fields,
        }
        headers = {"x-user-id": user, "authorization": "Bearer key"}
        url = f"{self.url}/v1/chat/completions"
        async with session.post(url, json=body, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.status == 200 else {"error": text}

    async def places(self, session: aiohttp.ClientSession, **fields: Any) -> dict[str, str]:
        """Which server each user comes to."""
        answers = await asyncio.gather(*(self.ask(session, user, **fields) for user in USERS))
        assert Counter(status for status, _ in answers) == {200: len(USERS)}, answers
        return {user: body["by"] for user, (_, body) in zip(USERS, answers, strict=True)}


@pytest.fixture
def fleet(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(
        Api(control_plane.kubeconfig, namespace), control_plane.kubeconfig, tmp_path / "router.log"
    )
    try:
        yield fleet
    finally:
        fleet.stop()


def _moved(before: dict[str, str], after: dict[str, str]) -> Sequence[str]:
    return [user for user in USERS if before[user] != after[user]]


def test_users_stay_where_they_are(fleet: Fleet) -> None:
    asyncio.run(_users_stay(fleet))


async def _users_stay(fleet: Fleet) -> None:
    connector = aiohttp.TCPConnector(limit=32)
    async with aiohttp.ClientSession(connector=connector) as session:
        await _without_a_server(fleet, session)
        first, second = fleet.start_server(2), fleet.start_server(3)
        await fleet.workers(session, 2)
        await _passes_on_what_it_is_sent(fleet, session)
        two = await fleet.places(session)
        assert set(two.values()) == {first, second}
        assert await fleet.places(session) == two

        third = fleet.start_server(4)
        await fleet.workers(session, 3)
        three = await fleet.places(session)
        moved = _moved(two, three)
        # A third, give or take the luck of 200 draws; nobody moves between the old ones.
        assert 0.2 < len(moved) / len(USERS) < 0.5
        assert {three[user] for user in moved} == {third}

        asking = asyncio.create_task(fleet.places(session, wait=1.0))
        await asyncio.sleep(0.5)  # the requests are with the servers
        fleet.kill_server(second)
        without = await asking
        await fleet.workers(session, 2)
        assert await fleet.places(session) == without
        assert {three[user] for user in _moved(three, without)} == {second}

        # A pod that is going still answers, and gets no new request.
        fleet._api.delete("pods", "server-4")
        await fleet.workers(session, 1)
        assert set((await fleet.places(session)).values()) == {first}
        await _ends_after_its_streams(fleet, session)
    # The header that names the user must not be in the log.
    assert "resident-" not in fleet.log.read_text()


async def _without_a_server(fleet: Fleet, session: aiohttp.ClientSession) -> None:
    for _ in range(600):
        try:
            status, _ = await fleet.ask(session, "resident-0")
            break
        except aiohttp.ClientError:
            await asyncio.sleep(0.1)
    # Not 404: the model is there and has no server now.
    assert status == 503
    async with session.get(f"{fleet.url}/readiness") as answer:
        assert answer.status == 503
    async with session.get(f"{fleet.url}/liveness") as answer:
        assert answer.status == 200


async def _passes_on_what_it_is_sent(fleet: Fleet, session: aiohttp.ClientSession) -> None:
    _, answer = await fleet.ask(session, "resident-0", vllm_xargs={"a": 1})
    assert answer["body"]["memory"] == {"user": "resident-0", "k": 3}
    assert answer["body"]["vllm_xargs"] == {"a": 1}
    assert answer["headers"]["authorization"] == "Bearer key"
    # Routes that the router does not know go the same way.
    own = f"{fleet.url}/inferscale/v1/anything"
    async with session.post(own, json={}, headers={"x-user-id": "resident-0"}) as other:
        seen = await other.json()
    assert (seen["by"], seen["path"]) == (answer["by"], "/inferscale/v1/anything")


async def _ends_after_its_streams(fleet: Fleet, session: aiohttp.ClientSession) -> None:
    body = {"model": "chat", "messages": [], "stream": True, "lines": 10}
    url = f"{fleet.url}/v1/chat/completions"
    async with session.post(url, json=body, headers={"x-user-id": "resident-0"}) as answer:
        lines = [await answer.content.readline()]
        fleet.router.send_signal(signal.SIGTERM)
        lines += [line async for line in answer.content]
    assert len([line for line in lines if line.startswith(b"data: ")]) == 10
    assert await asyncio.to_thread(fleet.router.wait, 30) == 0
