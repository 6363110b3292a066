"""The client against a real API server: what its answers are taken for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from tests.integration.kube.control_plane import ControlPlane
from tests.integration.kube.resources import memory_store

from inferscale_operator.cluster.client import ApiCluster
from inferscale_operator.cluster.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    UnavailableError,
)
from inferscale_operator.cluster.redact import SECRET_DIGEST
from inferscale_operator.cluster.transport import Transport, load_configuration
from inferscale_operator.desired.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    MEMORY_STORE,
    SCALED_OBJECT,
    SECRET,
    Kind,
)

Run = Callable[[Callable[[ApiCluster], Awaitable[None]]], None]


@pytest.fixture
def run(control_plane: ControlPlane) -> Run:
    def with_cluster(work: Callable[[ApiCluster], Awaitable[None]]) -> None:
        async def body() -> None:
            transport = Transport(await load_configuration(str(control_plane.kubeconfig), None))
            cluster = ApiCluster(transport)
            try:
                await work(cluster)
            finally:
                await cluster.close()
                await transport.close()

        asyncio.run(body())

    return with_cluster


def config(namespace: str, **data: str) -> dict[str, Any]:
    metadata = {"name": "c", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def store(namespace: str) -> dict[str, Any]:
    body = memory_store("m")
    body["metadata"]["namespace"] = namespace
    return body


def test_create_apply_get_delete(run: Run, namespace: str) -> None:
    async def work(cluster: ApiCluster) -> None:
        made = await cluster.create(config(namespace, a="1"))
        with pytest.raises(AlreadyExistsError):
            await cluster.create(config(namespace, a="2"))
        applied = await cluster.apply(config(namespace, a="3"))
        assert applied["data"] == {"a": "3"}
        assert "managedFields" not in applied["metadata"]
        await cluster.delete(CONFIG_MAP, namespace, "c", "another-uid")
        assert await cluster.get(CONFIG_MAP, namespace, "c") == applied
        await cluster.delete(CONFIG_MAP, namespace, "c", made["metadata"]["uid"])
        await cluster.delete(CONFIG_MAP, namespace, "c", made["metadata"]["uid"])
        assert await cluster.get(CONFIG_MAP, namespace, "c") is None

    run(work)


def test_status_and_finalizer_need_the_version_that_was_read(run: Run, namespace: str) -> None:
    async def work(cluster: ApiCluster) -> None:
        first = await cluster.create(store(namespace))
        second = await cluster.set_finalizer(first, "inferscale.dev/erase", present=True)
        assert second["metadata"]["finalizers"] == ["inferscale.dev/erase"]
        with pytest.raises(ConflictError):
            await cluster.patch_status(first, {"tier": "disk"})
        with pytest.raises(ConflictError):
            await cluster.set_finalizer(first, "inferscale.dev/other", present=True)
        third = await cluster.patch_status(second, {"tier": "disk"})
        assert third["status"]["tier"] == "disk"
        fourth = await cluster.set_finalizer(third, "inferscale.dev/erase", present=False)
        assert not fourth["metadata"].get("finalizers")
        await cluster.delete(MEMORY_STORE, namespace, "m", first["metadata"]["uid"])
        with pytest.raises(ConflictError):
            await cluster.patch_status(fourth, {"tier": "disk"})

    run(work)


def test_what_the_schema_refuses_is_invalid_and_names_the_field(run: Run, namespace: str) -> None:
    async def work(cluster: ApiCluster) -> None:
        live = await cluster.create(store(namespace))
        with pytest.raises(InvalidError, match=r"status\.tier"):
            await cluster.patch_status(live, {"tier": 7})

    run(work)


def test_missing_namespace_means_look_again(run: Run) -> None:
    async def work(cluster: ApiCluster) -> None:
        with pytest.raises(ConflictError):
            await cluster.create(config("no-such-namespace"))
        with pytest.raises(ConflictError):
            await cluster.apply(config("no-such-namespace"))

    run(work)


def test_secret_values_do_not_enter_the_process_state(run: Run, namespace: str) -> None:
    async def work(cluster: ApiCluster) -> None:
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "s", "namespace": namespace},
            "data": {"key": "c2VjcmV0"},
        }
        await cluster.create(secret)
        before = await cluster.get(SECRET, namespace, "s")
        assert before is not None
        assert before["data"] == {"key": ""}
        await cluster.apply({**secret, "data": {"key": "b3RoZXI="}})
        after = await cluster.get(SECRET, namespace, "s")
        assert after is not None
        mark = before["metadata"]["annotations"][SECRET_DIGEST]
        assert after["metadata"]["annotations"][SECRET_DIGEST] != mark

    run(work)


def test_discovery_tells_known_and_unknown_kinds(run: Run) -> None:
    async def work(cluster: ApiCluster) -> None:
        assert await cluster.knows(DEPLOYMENT)
        assert await cluster.knows(MEMORY_STORE)
        assert not await cluster.knows(SCALED_OBJECT)
        assert not await cluster.knows(Kind("apps", "v1", "Nothing", "nothings"))

    run(work)


def test_no_server_is_unavailable(tmp_path: Any) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "users: [{name: c, user: {token: t}}]\n"
        "contexts: [{name: c, context: {cluster: c, user: c}}]\n"
    )

    async def body() -> None:
        transport = Transport(await load_configuration(str(file), None))
        with pytest.raises(UnavailableError, match="no answer"):
            await ApiCluster(transport).get(CONFIG_MAP, "ns", "c")
        await transport.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"state": "encoding"}', {"state": "encoding"}), ("[1]", None), ("text", None)],
)
def test_pod_is_asked_on_its_named_port(run: Run, text: str, expected: Any) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text)

    async def work(cluster: ApiCluster) -> None:
        application = web.Application()
        application.router.add_get("/status", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports = [{"name": "status", "containerPort": runner.addresses[0][1]}]
        pod = {"spec": {"containers": [{"ports": ports}]}, "status": {"podIP": "127.0.0.1"}}
        assert await cluster.ask_pod(pod, "status", "/status") == expected
        assert await cluster.ask_pod(pod, "other", "/status") is None
        assert await cluster.ask_pod(pod, "status", "/missing") is None
        assert await cluster.ask_pod({**pod, "status": {}}, "status", "/status") is None
        await runner.cleanup()
        assert await cluster.ask_pod(pod, "status", "/status") is None

    run(work)
