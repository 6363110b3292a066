"""Refuses request fields that only this server may set, and salts the requests of known callers.

``kv_transfer_params`` could name other users' segments and ``cache_salt`` could aim at their
prefix-cache blocks, so neither is taken from a client on any route. Where callers are told apart,
their requests carry a salt even without memory: by the cached tokens of an answer, or its time, one
could otherwise find out what another asked. Pure ASGI: the body is read once and handed on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from inferscale_runtime.server.auth.access import SALTED, USERS
from inferscale_runtime.server.refusal import error_response
from inferscale_runtime.server.watched import ARRIVAL

FORBIDDEN = ("kv_transfer_params", "cache_salt")
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def forbidden_field(body: bytes) -> str | None:
    """Name of the first forbidden field in a JSON body, looked for in nested request objects too.

    Args:
        body: Raw request body; anything that is not JSON is left to the route.
    """
    # Escapes and UTF-16/32 (which hold NUL bytes) hide the names from a plain search.
    hidden = b"\\u" in body or b"\0" in body
    if not hidden and not any(name.encode() in body for name in FORBIDDEN):
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    for name in FORBIDDEN:
        if value.get(name) is not None:
            return name
        for outer in ("vllm_xargs", "extra_args", "sampling_params"):
            inner = value.get(outer)
            if isinstance(inner, dict) and _holds(inner, name):
                return f"{outer}.{name}"
    return None


def salted(body: bytes, salt: str) -> bytes:
    """A JSON body with ``cache_salt``; anything else is left to the route, which refuses it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(value, dict):
        return body
    return json.dumps({**value, "cache_salt": salt}).encode()


def _holds(value: dict[str, Any], name: str) -> bool:
    # A stack of our own: a client chooses the depth.
    stack: list[Any] = [value]
    while stack:
        current = stack.pop()
        if isinstance(current, list):
            stack.extend(current)
        elif isinstance(current, dict):
            if current.get(name) is not None:
                return True
            stack.extend(current.values())
    return False


class FieldGuard:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks POST bodies and passes everything else through."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) if "path" in scope else ""
        # The memory API has no such fields, and limits of its own for bodies.
        if scope["type"] != "http" or scope["method"] != "POST" or path.startswith(USERS):
            await self._app(scope, receive, send)
            return
        messages: list[MutableMapping[str, Any]] = []
        body = b""
        while True:
            message = await receive()
            messages.append(message)
            body += message.get("body", b"")
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        scope[ARRIVAL] = time.time()
        field = forbidden_field(body)
        if field is not None:
            response = error_response(
                f"field '{field}': it is set by the server and not accepted from clients; leave it "
                "out and name the user in 'memory'",
                field,
                HTTPStatus.BAD_REQUEST,
            )
            await response(scope, receive, send)
            return

        salt = scope.get("state", {}).get("salt")
        if salt is not None and path in SALTED and messages[-1]["type"] == "http.request":
            body = salted(body, salt)
            headers = [h for h in scope["headers"] if h[0].lower() != b"content-length"]
            headers.append((b"content-length", str(len(body)).encode()))
            scope = {**scope, "headers": headers}
            messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> MutableMapping[str, Any]:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)
