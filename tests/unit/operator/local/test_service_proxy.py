from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from inferscale_operator.desired.kinds import POD
from inferscale_operator.desired.paths import PORTS_ANNOTATION
from inferscale_operator.local.memory_cluster import MemoryCluster
from inferscale_operator.local.probes import http_get
from inferscale_operator.local.service_proxy import ServiceProxy

pytestmark = pytest.mark.asyncio


class Backend:
    """Answers every HTTP request with its name; answers can be held back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await reader.readuntil(b"\r\n\r\n")
            self.asked.set()
            await self.may_answer.wait()
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + self.name.encode())
            await writer.drain()
        writer.close()


class World:
    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.servers: list[asyncio.Server] = []
        self.proxy = ServiceProxy(self.cluster, "ns", "s")
        self.port = 0

    async def start(self) -> None:
        ports = [{"name": "http", "port": 80, "targetPort": "http"}]
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "s", "namespace": "ns"},
            "spec": {"ports": ports, "selector": {"app": "s"}},
        }
        await self.cluster.create(service)
        self.port = await self.proxy.start(0)

    async def add(self, name: str, app: str = "s") -> Backend:
        backend = Backend(name)
        server = await asyncio.start_server(backend.serve, "127.0.0.1", 0)
        self.servers.append(server)
        port = server.sockets[0].getsockname()[1]
        annotations = {PORTS_ANNOTATION: json.dumps({"http": port})}
        metadata = {"name": name, "namespace": "ns", "labels": {"app": app}}
        container = {"name": "main", "ports": [{"name": "http", "containerPort": 8000}]}
        await self.cluster.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": metadata | {"annotations": annotations},
                "spec": {"containers": [container]},
            }
        )
        await self.ready(name)
        return backend

    async def ready(self, name: str, *, ready: bool = True) -> None:
        pod = await self.pod(name)
        status = {"conditions": [{"type": "Ready", "status": str(ready)}]}
        await self.cluster.patch_status(pod, status)

    async def pod(self, name: str) -> dict[str, Any]:
        found = await self.cluster.get(POD, "ns", name)
        assert found is not None
        return found

    async def ask(self) -> tuple[int, str]:
        status, body = await http_get(self.port, "/", 30)
        return status, body.decode()


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.start()
    yield world
    await world.proxy.close()
    await world.proxy.abort()
    for server in world.servers:
        server.close()


async def test_without_a_ready_pod_the_answer_is_503(world: World) -> None:
    status, body = await world.ask()
    assert status == 503
    assert "no pod" in json.loads(body)["error"]["message"]


async def test_ready_pods_take_turns_and_others_get_nothing(world: World) -> None:
    await world.add("a")
    await world.add("b")
    await world.add("c")
    await world.add("other", app="other")
    await world.ready("c", ready=False)
    assert {(await world.ask())[1] for _ in range(4)} == {"a", "b"}


async def test_a_deleted_pod_gets_no_new_connections_and_finishes_its_answers(
    world: World,
) -> None:
    old = await world.add("old")
    old.may_answer.clear()
    asked = asyncio.ensure_future(world.ask())
    await old.asked.wait()
    pod = await world.cluster.set_finalizer(await world.pod("old"), "x", present=True)
    await world.cluster.delete(POD, "ns", "old", pod["metadata"]["uid"])
    await world.add("new")
    assert [await world.ask() for _ in range(2)] == [(200, "new"), (200, "new")]
    old.may_answer.set()
    assert await asked == (200, "old")


async def test_a_pod_that_does_not_accept_is_passed_over(world: World) -> None:
    await world.add("dead")
    world.servers[0].close()
    await world.servers[0].wait_closed()
    await world.add("alive")
    assert {await world.ask() for _ in range(4)} == {(200, "alive")}


async def test_a_taken_port_is_an_error(world: World) -> None:
    with pytest.raises(OSError, match="address already in use"):
        await ServiceProxy(world.cluster, "ns", "s").start(world.port)
