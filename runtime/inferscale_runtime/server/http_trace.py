"""ASGI middleware: the span of a chat request, around everything that is done for it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from opentelemetry.trace import StatusCode

from inferscale_runtime import tracing

ROUTE = "/v1/chat/completions"
"""The only route with a span of ours. Others may carry a user in their path."""


class TraceMiddleware:
    """Pure ASGI, so that the span lasts until the last byte of a stream."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Opens the span and hands on."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        with tracing.server_span(f"POST {ROUTE}", headers) as span:
            span.set_attributes({"http.request.method": "POST", "http.route": ROUTE})

            async def watched_send(message: MutableMapping[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    status = int(message["status"])
                    span.set_attribute("http.response.status_code", status)
                    if status >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            await self._app(scope, receive, watched_send)
