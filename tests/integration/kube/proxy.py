"""A reverse proxy before the API server that misbehaves on request and counts what passes.

Its front is plain HTTP. It runs in a thread; everything here may be called from a test.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

WRITES = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True)
class Seen:
    """A request that came."""

    verb: str
    path: str
    code: int


@dataclass
class Fault:
    """What happens to some requests.

    Attributes:
        verb: Regular expression for the verb.
        path: Regular expression, searched in path and query.
        skip: So many matching requests pass first.
        times: So many are hit then.
        code: Answered instead of the server; 0 passes the request on.
        headers: Of that answer.
        delay: Seconds before anything else.
        cut: Whether the connection is closed without an answer.
        after: With ``cut``: whether the server gets the request first, and only its answer is lost.
    """

    verb: str = ".*"
    path: str = ".*"
    skip: int = 0
    times: int = 1
    code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    cut: bool = False
    after: bool = False
    hits: int = 0

    def takes(self, verb: str, path: str) -> bool:
        """Whether the next request with this verb and path is hit; counts it."""
        if self.times <= 0 or not re.fullmatch(self.verb, verb) or not re.search(self.path, path):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        self.hits += 1
        return True


_REASONS = {
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}


class Proxy:
    """The running proxy.

    Attributes:
        faults: What to do to whom; a test may append at any time.
        seen: Every request, in order.
        frozen: While True no watch tells of anything, and no stream is closed.
        kubeconfig: How to reach the proxy.
    """

    def __init__(self, upstream_kubeconfig: Path, folder: Path) -> None:
        text = yaml.safe_load(upstream_kubeconfig.read_text())
        self._upstream = str(text["clusters"][0]["cluster"]["server"])
        self._folder = folder
        self._text = text
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.frozen = False
        self.kubeconfig = folder / "proxy-kubeconfig"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def writes(self, path: str = ".*") -> list[Seen]:
        """Writes so far whose path matches; the lease's renewals are left out."""
        return [
            item
            for item in list(self.seen)
            if item.verb in WRITES and "/leases" not in item.path and re.search(path, item.path)
        ]

    def start(self) -> None:
        """Starts to answer; writes the kubeconfig."""
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        cluster = {"server": f"http://127.0.0.1:{port}"}
        text = {**self._text, "clusters": [{"name": "proxy", "cluster": cluster}]}
        context = {**text["contexts"][0]["context"], "cluster": "proxy"}
        text["contexts"] = [{"name": "proxy", "context": context}]
        text["current-context"] = "proxy"
        self.kubeconfig.write_text(yaml.safe_dump(text))

    def stop(self) -> None:
        """Ends."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> int:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=False, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            trust_env=False,
        )
        application = web.Application(client_max_size=2**25)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def _stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path
        fault = next((item for item in self.faults if item.takes(request.method, path)), Fault())
        if fault.delay:
            await asyncio.sleep(fault.delay)
        if fault.cut and not fault.after:
            return self._cut(request)
        if fault.code:
            self.seen.append(Seen(request.method, path, fault.code))
            return _status(fault)
        return await self._forward(request, lose_answer=fault.cut)

    def _cut(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(Seen(request.method, request.raw_path, 0))
        if request.transport is not None:
            request.transport.close()
        return web.Response(status=500)

    async def _forward(self, request: web.Request, *, lose_answer: bool) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        async with self._session.request(
            request.method,
            self._upstream + request.raw_path,
            headers=headers,
            data=await request.read() or None,
            allow_redirects=False,
        ) as answer:
            if lose_answer:
                await answer.read()
                return self._cut(request)
            self.seen.append(Seen(request.method, request.raw_path, answer.status))
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP}
            if "watch=true" not in request.query_string:
                body = await answer.read()
                return web.Response(status=answer.status, headers=kept, body=body)
            return await self._stream(request, answer, kept)

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        front = web.StreamResponse(status=answer.status, headers=headers)
        await front.prepare(request)
        async for chunk in answer.content.iter_any():
            while self.frozen:
                await asyncio.sleep(0.05)
            await front.write(chunk)
        return front


_HOP = frozenset(
    {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "accept-encoding"}
)


def _status(fault: Fault) -> web.Response:
    reason = _REASONS.get(fault.code, "InternalError")
    body: dict[str, Any] = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": "made up by the proxy",
        "code": fault.code,
    }
    return web.json_response(body, status=fault.code, headers=fault.headers)


@contextmanager
def running_proxy(upstream_kubeconfig: Path, folder: Path) -> Iterator[Proxy]:
    """A proxy for the length of a block."""
    proxy = Proxy(upstream_kubeconfig, folder)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.frozen = False
        proxy.stop()


__all__ = ["Fault", "Proxy", "Seen", "running_proxy"]
