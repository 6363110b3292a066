"""What all routes of the memory API share: a limit for bodies, and the form of errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from inferscale_runtime.errors import ConfigError, StoreConflictError, StoreError
from inferscale_runtime.server import metrics
from inferscale_runtime.server.refusal import Refusal, error_response

MAX_BODY_BYTES = 16 << 20
"""Room for a batch of the longest facts in three-byte characters, halved (arbitrary)."""
_MAX_PARAM_CHARS = 100


class MemoryRoute(APIRoute):
    """A route whose errors have OpenAI's form and quote nothing of the request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wraps FastAPI's handler."""
        inner = super().get_route_handler()
        operation = self.name

        async def handle(request: Request) -> Response:
            started = time.perf_counter()
            request.state.audit.action = operation.replace("_", ".")
            response = await _answer(inner, request)
            metrics.MEMORY_API_SECONDS.labels(operation).observe(time.perf_counter() - started)
            metrics.MEMORY_API_REQUESTS.labels(operation, str(response.status_code)).inc()
            return response

        return handle


async def _answer(
    inner: Callable[[Request], Coroutine[Any, Any, Response]], request: Request
) -> Response:
    try:
        return await inner(await _limited(request))
    except Refusal as refusal:
        return refusal.response()
    except RequestValidationError as error:
        return _invalid(error)
    except HTTPException as error:
        # FastAPI's own, for a body that it cannot parse.
        message = "field 'body': it cannot be parsed; send JSON in UTF-8"
        return error_response(message, "body", HTTPStatus(error.status_code))
    except StoreConflictError:
        return error_response(
            "field 'user': other writers were faster every time; try again",
            "user",
            HTTPStatus.CONFLICT,
            {"retry-after": "1"},
        )
    except ConfigError as error:
        return error_response(str(error), "body", HTTPStatus.BAD_REQUEST)
    except StoreError:
        return error_response(
            "field 'store': it cannot be read or written now; try again, and see 'inferscale store "
            "verify'",
            "store",
            HTTPStatus.SERVICE_UNAVAILABLE,
            {"retry-after": "5"},
        )


def _invalid(error: RequestValidationError) -> Response:
    first = error.errors()[0]
    # Without the first part, which says where the field is: body, query, header or path.
    path = [str(part) for part in first["loc"]]
    name = ".".join(path[1:] if len(path) > 1 and first["type"] != "json_invalid" else path[:1])
    name = name[:_MAX_PARAM_CHARS].encode("ascii", "backslashreplace").decode()
    what = first["msg"].removeprefix("Value error, ")
    return error_response(f"field '{name}': {what}", name, HTTPStatus.BAD_REQUEST)


async def _limited(request: Request) -> Request:
    """The same request with its body read, as far as that is allowed."""
    if request.method not in ("PUT", "POST"):
        return request
    declared = request.headers.get("content-length", "0")
    body = b""
    if not declared.isdigit() or len(declared) > 18 or int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            return dict(await request.receive())
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(request.scope, receive)


def _too_large() -> Refusal:
    return Refusal(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"field 'body': it is larger than {MAX_BODY_BYTES} bytes; send smaller batches",
        "body",
        {"connection": "close"},
    )
