from __future__ import annotations

import json

import pytest

from inferscale_operator.cluster.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    UnavailableError,
)
from inferscale_operator.cluster.transport import GoneError, NotFoundError, error_of, path_of
from inferscale_operator.desired.kinds import DEPLOYMENT, NAMESPACE, POD


def answer(reason: str = "", **details: object) -> bytes:
    value = {"kind": "Status", "reason": reason, "message": "text", "details": details}
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("code", "data", "error"),
    [
        (400, answer("BadRequest"), InvalidError),
        (401, answer("Unauthorized"), UnavailableError),
        (403, answer("Forbidden"), InvalidError),
        (403, answer("Forbidden", causes=[{"reason": "NamespaceTerminating"}]), ConflictError),
        (404, answer("NotFound"), NotFoundError),
        (409, answer("AlreadyExists"), AlreadyExistsError),
        (409, answer("Conflict"), ConflictError),
        (410, answer("Expired"), GoneError),
        (422, answer("Invalid"), ConflictError),
        (422, answer("Invalid", causes=[{"field": "spec"}]), InvalidError),
        (429, answer("TooManyRequests"), UnavailableError),
        (500, b"<html>", UnavailableError),
        (503, b"", UnavailableError),
        (302, b"", UnavailableError),
    ],
)
def test_error_by_what_can_be_done(code: int, data: bytes, error: type[Exception]) -> None:
    found = error_of("GET", "/path", code, data, {})
    assert type(found) is error
    assert f"GET /path: {code}" in str(found)


@pytest.mark.parametrize(
    ("headers", "data", "seconds"),
    [
        ({"Retry-After": "7"}, b"", 7.0),
        ({}, answer(retryAfterSeconds=3), 3.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, b"", None),
        ({"Retry-After": "100000"}, b"", 300.0),
        ({}, b"", None),
    ],
)
def test_retry_after(headers: dict[str, str], data: bytes, seconds: float | None) -> None:
    found = error_of("GET", "/path", 429, data, headers)
    assert isinstance(found, UnavailableError)
    assert found.retry_after == seconds


def test_paths() -> None:
    assert path_of(POD, "ns", "p") == "/api/v1/namespaces/ns/pods/p"
    assert path_of(POD) == "/api/v1/pods"
    assert path_of(NAMESPACE, "ns", "n") == "/api/v1/namespaces/n"
    assert path_of(DEPLOYMENT, "ns", "d", "status") == (
        "/apis/apps/v1/namespaces/ns/deployments/d/status"
    )
    assert path_of(POD, "ns", "../x") == "/api/v1/namespaces/ns/pods/..%2Fx"
