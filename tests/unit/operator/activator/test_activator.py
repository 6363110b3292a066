"""The activator between a client and a server, all three over HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from inferscale_operator.activator.admission import MAX_BODY_BYTES, Admission, FullError
from inferscale_operator.activator.application import Activator
from inferscale_operator.activator.command import listen
from inferscale_operator.activator.forwarding import passed_on
from inferscale_operator.activator.metrics import ActivatorMetrics
from inferscale_operator.activator.permission import MayWake, any_token, everybody, one_key
from inferscale_operator.activator.servers import Servers, WakeError

pytestmark = pytest.mark.asyncio
CHAT = "/v1/chat/completions"


@dataclass
class Model:
    """A server that can be asleep; sends words one by one when it is told to."""

    awake: bool = False
    wakes: int = 0
    wakes_itself: bool = False
    seen: list[web.BaseRequest] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    next_word: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    refuse: int = 0
    url: str = ""

    async def find(self) -> str | None:
        return self.url if self.awake else None

    async def wake(self) -> None:
        self.wakes += 1
        self.awake = self.awake or self.wakes_itself

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.refuse:
            self.refuse -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        self.seen.append(request)
        self.bodies.append(await request.read())
        if request.path == "/cut":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"begin")
            assert request.transport is not None
            request.transport.abort()
            return response
        if request.path != "/stream":
            return web.json_response({"path": request.raw_path}, headers={"X-Server": "yes"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number in range(3):
                await response.write(f"data: {number}\n\n".encode())
                await self.next_word.wait()
                self.next_word.clear()
        except asyncio.CancelledError:
            self.gone.set()
            raise
        return response


@dataclass
class Rig:
    """Everything that a test talks to."""

    model: Model
    activator: Activator
    admission: Admission
    metrics: ActivatorMetrics
    client: aiohttp.ClientSession
    runner: web.AppRunner

    def count(self, result: str) -> float:
        name = "inferscale_activator_requests_total"
        return self.metrics.registry.get_sample_value(name, {"result": result}) or 0.0

    async def ask(self, path: str = CHAT, **options: Any) -> tuple[int, Any, Any]:
        async with self.client.post(path, **options) as answer:
            text = await answer.text()
            return answer.status, json.loads(text), answer.headers

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def rig(
    model: Model | None = None,
    *,
    max_held: int = 10,
    max_wait: float = 20.0,
    may_wake: MayWake = everybody,
    wake: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[Rig]:
    model = model or Model()
    server = web.Application(client_max_size=MAX_BODY_BYTES)
    server.router.add_route("*", "/{path:.*}", model.answer)
    backend = web.AppRunner(server, handler_cancellation=True, shutdown_timeout=1)
    await backend.setup()
    await web.TCPSite(backend, "127.0.0.1", 0).start()
    model.url = f"http://127.0.0.1:{backend.addresses[0][1]}"
    metrics, admission = ActivatorMetrics(CollectorRegistry()), Admission(max_held)
    servers = Servers(model.find, wake or model.wake, metrics)
    activator = Activator("m", servers, admission, metrics, max_wait, may_wake)
    runner = await listen(activator, "127.0.0.1", 0, 5)
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession(base, trust_env=False) as client:
            yield Rig(model, activator, admission, metrics, client, runner)
    finally:
        await runner.cleanup()
        await backend.cleanup()


async def test_a_request_waits_wakes_the_model_and_is_answered() -> None:
    async with rig() as r:
        asked = asyncio.create_task(r.ask(f"{CHAT}?a=%2B", data=b"body"))
        await r.until(lambda: r.model.wakes == 1)
        assert r.admission.held == 1
        r.model.awake = True
        status, body, headers = await asked
        assert (status, body) == (200, {"path": f"{CHAT}?a=%2B"})
        assert headers["X-Server"] == "yes"
        assert r.model.bodies == [b"body"]
        assert (r.admission.held, r.admission.bytes) == (0, 0)
        assert r.count("forwarded") == 1
        seconds = r.metrics.registry.get_sample_value("inferscale_activator_wake_seconds_count")
        assert seconds == 1


async def test_many_requests_wake_once_and_all_are_answered() -> None:
    async with rig() as r:
        asked = [asyncio.create_task(r.ask(data=str(n).encode())) for n in range(10)]
        await r.until(lambda: r.admission.held == 10 and r.model.wakes == 1)
        r.model.awake = True
        answers = await asyncio.gather(*asked)
        assert [status for status, _, _ in answers] == [200] * 10
        assert sorted(r.model.bodies) == [str(n).encode() for n in range(10)]
        assert r.model.wakes == 1


async def test_past_the_queue_clients_are_told_when_to_come_again() -> None:
    async with rig(max_held=1) as r:
        first = asyncio.create_task(r.ask())
        await r.until(lambda: r.admission.held == 1)
        status, body, headers = await r.ask()
        assert (status, body["error"]["type"]) == (503, "unavailable")
        assert int(headers["Retry-After"]) > 0
        r.model.awake = True
        assert (await first)[0] == 200
        assert r.count("full") == 1


async def test_past_the_longest_wait_too() -> None:
    async with rig(max_wait=0.5) as r:
        status, body, headers = await r.ask()
        assert status == 503
        assert "within" in body["error"]["message"]
        assert int(headers["Retry-After"]) > 0
        assert (r.admission.held, r.admission.bytes) == (0, 0)


async def test_a_body_that_is_too_large_is_refused() -> None:
    async with rig(Model(awake=True)) as r:
        status, _, _ = await r.ask(data=b"x" * (MAX_BODY_BYTES + 1))
        assert status == 413
        assert r.count("too_large") == 1


async def test_a_client_that_goes_away_gives_its_place_to_the_next() -> None:
    async with rig(max_held=1) as r:
        first = asyncio.create_task(r.ask())
        await r.until(lambda: r.admission.held == 1)
        first.cancel()
        await r.until(lambda: r.admission.held == 0)
        second = asyncio.create_task(r.ask())
        await r.until(lambda: r.admission.held == 1)
        r.model.awake = True
        assert (await second)[0] == 200
        assert r.count("gone") == 1


async def test_words_come_through_as_they_are_spoken() -> None:
    async with rig(Model(awake=True)) as r, r.client.post("/stream") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        for number in range(3):
            # The next word is not spoken before this one has arrived.
            assert await answer.content.readuntil(b"\n\n") == f"data: {number}\n\n".encode()
            r.model.next_word.set()
        assert await answer.content.read() == b""


async def test_a_client_that_hangs_up_ends_the_answer_at_the_server() -> None:
    async with rig(Model(awake=True)) as r:
        async with r.client.post("/stream") as answer:
            await answer.content.readuntil(b"\n\n")
            answer.close()
        async with asyncio.timeout(20):
            await r.model.gone.wait()


async def test_an_answer_that_breaks_off_does_not_look_complete() -> None:
    async with rig(Model(awake=True)) as r:
        with pytest.raises(aiohttp.ClientError):
            async with r.client.post("/cut") as answer:
                await answer.read()
        await r.until(lambda: r.count("failed") == 1)


async def test_a_server_that_went_before_it_answered_is_not_the_last_word() -> None:
    async with rig(Model(awake=True, refuse=2)) as r:
        status, _, _ = await r.ask(data=b"once")
        assert status == 200
        assert r.model.bodies == [b"once"]


async def test_authorization_passes_through_and_hop_headers_do_not() -> None:
    async with rig(Model(awake=True)) as r:
        headers = {"Authorization": "Bearer secret", "Connection": "x-mine", "X-Mine": "1"}
        await r.ask(headers={**headers, "X-Other": "2"})
        (seen,) = r.model.seen
        assert seen.headers["Authorization"] == "Bearer secret"
        assert seen.headers["X-Other"] == "2"
        assert "X-Mine" not in seen.headers


async def test_without_the_key_nobody_wakes_the_model() -> None:
    async with rig(may_wake=one_key(lambda: "right")) as r:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
            status, body, _ = await r.ask(headers=headers)
            assert (status, body) == (401, {"error": "Unauthorized"})
        async with r.client.get("/v1/models") as answer:
            assert answer.status == 401
        assert r.model.wakes == 0
        asked = asyncio.create_task(r.ask(headers={"Authorization": "Bearer right"}))
        await r.until(lambda: r.model.wakes == 1)
        r.model.awake = True
        assert (await asked)[0] == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/health", 200),
        ("/inferscale/v1/ready", 200),
        ("/v1/models", 200),
        ("/metrics", 200),
        ("/inferscale/v1/status", 200),
        ("/version", 503),
    ],
)
async def test_questions_about_the_server_do_not_wake_it(path: str, status: int) -> None:
    async with rig() as r:
        async with r.client.get(path) as answer:
            assert answer.status == status
            text = await answer.text()
        if path == "/v1/models":
            assert json.loads(text)["data"][0]["id"] == "m"
        assert r.model.wakes == 0
        r.model.awake = True
        status = 0
        async with asyncio.timeout(20):
            while status != 200:  # that none was ready is believed for a moment
                async with r.client.get("/version") as answer:
                    status = answer.status
        assert r.count("forwarded") == 1


async def test_the_api_server_may_fail_for_a_while() -> None:
    tries = []

    async def wake() -> None:
        tries.append(1)
        raise WakeError("403")

    async with rig(wake=wake) as r:
        asked = asyncio.create_task(r.ask())
        await r.until(lambda: len(tries) == 1)
        r.model.awake = True  # somebody else woke it
        assert (await asked)[0] == 200
        assert r.metrics.registry.get_sample_value("inferscale_activator_wake_errors_total") == 1


async def test_a_stopping_activator_ends_what_it_holds_in_order() -> None:
    async with rig() as r:
        asked = asyncio.create_task(r.ask())
        await r.until(lambda: r.admission.held == 1)
        r.activator.draining = True
        async with r.client.get("/health") as answer:
            assert answer.status == 503
        stopping = asyncio.create_task(r.runner.cleanup())
        await asyncio.sleep(0)
        r.model.awake = True
        assert (await asked)[0] == 200
        await stopping


async def test_bytes_are_bounded_too() -> None:
    admission = Admission(10, max_bytes=2 * MAX_BODY_BYTES)
    with admission.body(MAX_BODY_BYTES), admission.body(None):
        with pytest.raises(FullError), admission.body(1):
            pass
    assert admission.bytes == 0


async def test_headers_named_by_connection_are_dropped() -> None:
    pairs = [("Connection", "close, X-A"), ("x-a", "1"), ("TE", "x"), ("b", "2"), ("b", "3")]
    assert list(passed_on(pairs).items()) == [("b", "2"), ("b", "3")]


async def test_a_changed_key_counts_at_once_and_a_missing_one_lets_nobody_in() -> None:
    keys = ["old\n"]
    may_wake = one_key(lambda: keys[-1] if keys else None)
    assert may_wake("Bearer old")
    keys.append("new")
    assert (may_wake("Bearer old"), may_wake("bearer new")) == (False, True)
    keys.clear()
    assert not may_wake("Bearer ")
    assert not may_wake("")


async def test_where_only_servers_can_check_a_token_some_token_is_asked_for() -> None:
    assert any_token("Bearer x.y.z")
    assert not any_token("Bearer ")
    assert not any_token("Basic x")
