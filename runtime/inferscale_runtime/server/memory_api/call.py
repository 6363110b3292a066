"""What the routes of the memory API are called with: parameters, headers, and the call itself."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, StringConstraints

from inferscale_runtime.server.auth.gate import admit_user
from inferscale_runtime.server.memory_api.idempotency import Idempotency
from inferscale_runtime.server.memory_api.models import MAX_ID_BYTES
from inferscale_runtime.server.memory_api.operations import MemoryOperations
from inferscale_runtime.server.memory_api.paths import decode_id
from inferscale_runtime.server.refusal import Refusal
from inferscale_runtime.server.stores import OpenStore

_ID_SCHEMA = {"minLength": 1, "maxLength": MAX_ID_BYTES, "pattern": r"^[^\x00]+$"}
UserPath = Annotated[
    str, Path(description="The user's id, percent-encoded.", json_schema_extra=_ID_SCHEMA)
]
FactPath = Annotated[
    str,
    Path(alias="id", description="The fact's id, percent-encoded.", json_schema_extra=_ID_SCHEMA),
]
StoreQuery = Annotated[
    str | None,
    Query(
        max_length=253,
        description="Which of the server's stores; the first writable one when absent.",
    ),
]
_Tag = Annotated[str, StringConstraints(max_length=1024)]
IfMatch = Annotated[
    _Tag | None,
    Header(description='Write only if the memory is at this version, for example `"v3"`.'),
]
IfNoneMatch = Annotated[
    _Tag | None,
    Header(description="`*`: write only a fact that is not there. Reading: 304 if unchanged."),
]
IdempotencyKey = Annotated[
    Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[!-~]+$")] | None,
    Header(description="A request with the same key and body gets the same answer."),
]


class Call:
    """One request: whose memory in which store, and what it needs."""

    def __init__(self, request: Request, user: UserPath, store: StoreQuery = None) -> None:
        self.user = decode_id(user, "user")
        # Before anything is looked up.
        admit_user(request, self.user, "user")
        self.request = request
        self.operations: MemoryOperations = request.app.state.inferscale_operations
        self._named = store

    def store(self) -> OpenStore:
        """The store that is meant."""
        opened = self.operations.open_store(self._named)
        self.request.state.audit.store = opened.entry.name
        return opened

    def stores(self) -> list[OpenStore]:
        """The store that is named, else all writable ones."""
        return [self.store()] if self._named is not None else self.operations.writable_stores()

    def count(self, **counts: int) -> None:
        """Puts counts into the audit log."""
        self.request.state.audit.counts.update(counts)

    async def once(
        self, key: str | None, carry_out: Callable[[str], Awaitable[Response]]
    ) -> Response:
        """Carries out a write, once for an idempotency key."""
        request = self.request
        if key is None:
            return await carry_out(uuid.uuid4().hex)
        path = request.scope["path"]
        scope = "\x00".join([request.state.principal.id, request.method, path, key])
        memory: Idempotency = request.app.state.inferscale_idempotency
        body = await request.body() + request.url.query.encode()
        return await memory.once(self.user, scope, body, lambda: carry_out(scope))


CallOf = Annotated[Call, Depends(Call)]


def etag(version: int) -> str:
    """The ETag of a version of a user's memory."""
    return f'"v{version}"'


def wanted_version(header: str | None) -> int | None:
    """The version that ``If-Match`` asks for.

    Raises:
        Refusal: 400 for what is no ETag of ours.
    """
    if header is None:
        return None
    text = header.strip()
    if text.startswith('"v') and text.endswith('"') and text[2:-1].isascii():
        number = text[2:-1]
        if number.isdigit() and len(number) < 18:
            return int(number)
    raise Refusal(
        HTTPStatus.BAD_REQUEST, "header 'If-Match': it must be one ETag such as \"v3\"", "If-Match"
    )


def versioned(body: BaseModel, version: int, status: int = 200) -> JSONResponse:
    """An answer with the ETag of a version."""
    return JSONResponse(body.model_dump(), status, {"etag": etag(version)})


def is_unchanged(header: str | None, version: int) -> bool:
    """Whether ``If-None-Match`` names a version, so that 304 is the answer."""
    if header is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return etag(version) in tags or "*" in tags
