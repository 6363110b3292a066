"""Refusals in OpenAI's error form."""

from __future__ import annotations

from collections.abc import Mapping
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
