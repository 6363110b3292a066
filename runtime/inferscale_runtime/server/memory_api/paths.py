"""Ids in paths: matched before they are decoded, then decoded once.

A user id may hold any character, ``/`` too. Servers decode paths before they match routes, so that
``%2F`` would end the id. Under the memory API routes therefore match the path as it was sent, and
the ids in it are decoded afterwards: ``..`` and ``%2e%2e`` are ids like any others.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from urllib.parse import unquote_to_bytes

from inferscale_runtime.server.auth.access import USERS
from inferscale_runtime.server.guard import Receive, Scope, Send
from inferscale_runtime.server.memory_api.models import MAX_ID_BYTES
from inferscale_runtime.server.refusal import Refusal


class UndecodedPaths:
    """ASGI middleware: gives routes of the memory API the path as it was sent."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything on."""
        if scope["type"] == "http" and scope.get("raw_path"):
            root = scope.get("root_path", "")
            if scope["path"].removeprefix(root).startswith(USERS):
                scope = {**scope, "path": scope["raw_path"].decode("latin-1")}
        await self._app(scope, receive, send)


def decode_id(sent: str, param: str) -> str:
    """An id out of a path.

    Args:
        sent: As it was sent.
        param: Name of the field, for the error.

    Raises:
        Refusal: 400 for what can be no id.
    """
    try:
        value = unquote_to_bytes(sent.encode("latin-1")).decode()
    except UnicodeError:
        value = ""
    if not 1 <= len(value.encode()) <= MAX_ID_BYTES or "\x00" in value:
        raise Refusal(
            HTTPStatus.BAD_REQUEST,
            f"field '{param}': it must be 1 to {MAX_ID_BYTES} bytes of percent-encoded UTF-8 "
            "without NUL; use such an id",
            param,
        )
    return value
