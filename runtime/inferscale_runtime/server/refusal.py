"""Refusals in OpenAI's error form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from fastapi.responses import JSONResponse

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.PRECONDITION_FAILED: "ConflictError",
    HTTPStatus.UNPROCESSABLE_ENTITY: "UnprocessableEntityError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
}


def error_response(
    message: str,
    param: str | None,
    status: HTTPStatus,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error in OpenAI's form.

    Args:
        message: Object, field, value and mend; never a fact's text or a secret.
        param: The field of the request that is wrong, or None.
        status: HTTP status.
        headers: Further response headers.
    """
    other = (
        "BadRequestError" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "InternalServerError"
    )
    kind = _TYPES.get(status, other)
    body = {"message": message, "type": kind, "param": param, "code": status.value}
    return JSONResponse({"error": body}, status_code=status.value, headers=dict(headers or {}))


class Refusal(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        message: As in :func:`error_response`.
        param: As there.
        headers: As there.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers

    def response(self) -> JSONResponse:
        """The answer."""
        return error_response(self.message, self.param, self.status, self.headers)


def unknown_user(field: str) -> Refusal:
    """404 for a user without memory, named in a field of the request."""
    message = f"field '{field}': no memory of this user is stored; write facts first"
    return Refusal(HTTPStatus.NOT_FOUND, message, field)


def unknown_store(field: str, known: Sequence[str]) -> Refusal:
    """404 for a store that this server does not have, named in a field of the request."""
    message = (
        f"field '{field}': this model has no such store; name one of {', '.join(known)}, or leave "
        "it out"
    )
    return Refusal(HTTPStatus.NOT_FOUND, message, field)
