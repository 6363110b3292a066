"""The activator's HTTP application: what is answered while a model sleeps, held, or refused.

No body and no header is ever logged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from inferscale_operator.activator.admission import MAX_BODY_BYTES, Admission, FullError
from inferscale_operator.activator.forwarding import (
    BrokenAnswerError,
    NotReachedError,
    forward,
    new_session,
)
from inferscale_operator.activator.metrics import ActivatorMetrics
from inferscale_operator.activator.servers import Servers

FULL_RETRY_SECONDS = 5
TIMEOUT_RETRY_SECONDS = 10
AGAIN_SECONDS = 0.2
"""Pause before another server is asked."""
STATUS_PATH = "/inferscale/v1/status"
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Activator:
    """Stands in for the servers of one model.

    Args:
        model: Name under which it is served.
        servers: Finds and wakes them.
        admission: Who may wait.
        metrics: Figures.
        max_wait_seconds: Longest wait of a request for a server.
        may_wake: Whether a request with this ``Authorization`` header may wake the model.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        model: str,
        servers: Servers,
        admission: Admission,
        metrics: ActivatorMetrics,
        max_wait_seconds: float,
        may_wake: Callable[[str], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._servers = servers
        self._admission = admission
        self._metrics = metrics
        self._max_wait = max_wait_seconds
        self._may_wake = may_wake
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self.draining = False
        metrics.held.set_function(lambda: admission.held)

    def application(self) -> web.Application:
        """The application, for one runner."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_get("/health", self._health)
        application.router.add_get("/ping", self._health)
        application.router.add_get("/inferscale/v1/ready", self._health)
        application.router.add_get("/metrics", self._read_metrics)
        application.router.add_get(STATUS_PATH, self._status)
        application.router.add_get("/v1/models", self._models)
        application.router.add_route("*", "/{path:.*}", self._any)
        application.on_startup.append(self._start)
        application.on_cleanup.append(self._end)
        return application

    async def _start(self, _: web.Application) -> None:
        self._session = new_session()

    async def _end(self, _: web.Application) -> None:
        await self._servers.close()
        if self._session is not None:
            await self._session.close()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.draining else 200)

    async def _read_metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._metrics.registry),
            headers={"Content-Type": CONTENT_TYPE_LATEST},
        )

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response({"held": self._admission.held})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """The list of models does not wake anybody."""
        if await self._servers.ready_now() is not None:
            return await self._any(request)
        if not self._may(request):
            return self._unauthorized()
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "inferscale"}
        return web.json_response({"object": "list", "data": [model]})

    async def _any(self, request: web.Request) -> web.StreamResponse:
        if not request.raw_path.startswith("/"):
            return _error(400, "the request target must be a path")
        if await self._servers.ready_now() is None:
            if request.method in _SAFE_METHODS:
                message = "the model is scaled to zero; a request with a body wakes it"
                return _error(503, message, TIMEOUT_RETRY_SECONDS)
            if not self._may(request):
                return self._unauthorized()
        try:
            with self._admission.body(request.content_length):
                return await self._forward(request)
        except FullError:
            self._count("full")
            return _error(503, "too many requests wait for a server", FULL_RETRY_SECONDS)
        except web.HTTPRequestEntityTooLarge:
            self._count("too_large")
            return _error(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        except TimeoutError:
            self._count("timeout")
            message = f"no server became ready within {self._max_wait:.0f} s"
            return _error(503, message, TIMEOUT_RETRY_SECONDS)
        except asyncio.CancelledError:
            self._count("gone")
            raise

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        deadline = self._clock() + self._max_wait
        with self._admission.hold():
            async with asyncio.timeout(self._max_wait):
                body = await request.read()
                server = await self._servers.wait()
        while True:
            try:
                answer = await forward(self._session, request, body, server)
            except NotReachedError:
                # It was on its way out, and has not begun to answer: another one may.
                self._servers.lost()
                with self._admission.hold():
                    async with asyncio.timeout(deadline - self._clock()):
                        await asyncio.sleep(AGAIN_SECONDS)
                        server = await self._servers.wait()
                continue
            except BrokenAnswerError:
                self._count("failed")
                # An orderly end would look like a complete answer.
                if request.transport is not None:
                    request.transport.abort()
                raise
            self._count("forwarded")
            return answer

    def _may(self, request: web.Request) -> bool:
        """Whether a request may wake the model; awake servers check for themselves."""
        return self._may_wake(request.headers.get("Authorization", ""))

    def _unauthorized(self) -> web.Response:
        self._count("unauthorized")
        return web.json_response({"error": "Unauthorized"}, status=401)

    def _count(self, result: str) -> None:
        self._metrics.requests.labels(result).inc()


def _error(status: int, message: str, retry_seconds: int | None = None) -> web.Response:
    headers = {"Retry-After": str(retry_seconds)} if retry_seconds is not None else {}
    kind = "unavailable" if status == 503 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "code": status}}
    return web.json_response(body, status=status, headers=headers)
