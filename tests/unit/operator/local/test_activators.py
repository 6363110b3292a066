"""The activators of ``inferscale up``: one for each model that sleeps, behind the model's port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from inferscale_operator.desired.kinds import PERSONALIZED_MODEL, POD
from inferscale_operator.desired.naming import labels
from inferscale_operator.desired.paths import PORTS_ANNOTATION
from inferscale_operator.desired.service import build_servers_service, build_service
from inferscale_operator.local.activators import LocalActivators
from inferscale_operator.local.memory_cluster import MemoryCluster
from inferscale_operator.local.service_proxy import ServiceProxy

pytestmark = pytest.mark.asyncio
GENERATION = "abc"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[int]:
    """A model server; its port."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"said": (await request.read()).decode()})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield int(runner.addresses[0][1])
    await runner.cleanup()


async def model(cluster: MemoryCluster, **autoscaling: Any) -> dict[str, Any]:
    return await cluster.apply(
        {
            "apiVersion": "inferscale.dev/v1alpha1",
            "kind": "PersonalizedModel",
            "metadata": {"name": "chat", "namespace": "default"},
            "spec": {
                "model": {"id": "m"},
                "memoryStores": [{"name": "s"}],
                "serving": {"replicas": 0},
                "autoscaling": autoscaling,
            },
        }
    )


async def ready_pod(cluster: MemoryCluster, owner: dict[str, Any], port: int) -> None:
    made = await cluster.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "chat-0",
                "namespace": "default",
                "labels": labels(owner, "server") | {"inferscale.dev/generation": GENERATION},
                "annotations": {PORTS_ANNOTATION: json.dumps({"http": port})},
            },
            "spec": {"containers": [{"ports": [{"name": "http", "containerPort": 8000}]}]},
        }
    )
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    await cluster.patch_status(made, ready)


async def test_a_request_at_the_models_port_wakes_it_and_is_answered(server: int) -> None:
    cluster = MemoryCluster()
    owner = await model(cluster, provider="operator", scaleToZero={})
    await cluster.apply(build_service(owner, GENERATION, asleep=True))
    await cluster.apply(build_servers_service(owner, GENERATION))
    activators = LocalActivators(cluster)
    await activators.sync()
    place = ("default", "chat")
    proxy = ServiceProxy(cluster, *place, lambda: activators.port(place))
    url = f"http://127.0.0.1:{await proxy.start(0)}"
    async with aiohttp.ClientSession(url, trust_env=False) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", data=b"hello"))
        async with asyncio.timeout(20):
            while True:
                live = await cluster.get(PERSONALIZED_MODEL, *place)
                assert live is not None
                if live["spec"]["serving"]["replicas"] == 1:
                    break
                await asyncio.sleep(0.02)
        assert activators.held(owner) == 1
        await ready_pod(cluster, owner, server)
        async with asyncio.timeout(20):
            answer = await asked
        assert await answer.json() == {"said": "hello"}
        assert activators.held(owner) == 0
        # Awake, the port leads to the servers themselves.
        await cluster.apply(build_service(owner, GENERATION))
        await activators.close()
        async with client.post("/x", data=b"direct") as direct:
            assert await direct.json() == {"said": "direct"}
    await proxy.close()
    await proxy.abort()
    assert await cluster.list(POD)


async def test_activators_come_and_go_with_what_the_models_ask_for() -> None:
    cluster = MemoryCluster()
    activators = LocalActivators(cluster)
    place = ("default", "chat")
    await model(cluster)
    await activators.sync()
    assert activators.port(place) is None
    await model(cluster, scaleToZero={})
    await activators.sync()
    first = activators.port(place)
    await activators.sync()
    assert first is not None
    assert activators.port(place) == first
    await model(cluster, scaleToZero={"maxHeldRequests": 1})
    await activators.sync()
    assert activators.port(place) not in (None, first)
    await model(cluster)
    await activators.sync()
    assert activators.port(place) is None
    await activators.close()
