"""What stands before every route, over a small application."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from inferscale_runtime.config import AuthConfig
from inferscale_runtime.server.auth.gate import Gate, admit_user
from inferscale_runtime.server.auth.middleware import AuthMiddleware
from inferscale_runtime.server.auth.principal import digest
from inferscale_runtime.server.guard import FieldGuard
from inferscale_runtime.server.refusal import Refusal

ALL, MAYA, READER = "all-" * 5, "maya-" * 5, "reader-" * 5
SECRET = b"s" * 32


def keys_file(folder: Path) -> str:
    path = folder / "keys.json"
    keys = [
        {"key": ALL, "permissions": ["chat", "read", "write", "admin"]},
        {"key": MAYA, "users": ["maya"]},
        {"key": READER, "permissions": ["read"]},
    ]
    path.write_text(json.dumps({"keys": keys}))
    return str(path)


def application(gate: Gate | None) -> FastAPI:
    app = FastAPI()
    app.state.inferscale_gate = gate

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.get("/inferscale/v1/status")
    async def status(request: Request) -> Any:
        return request.state.principal and sorted(request.state.principal.permissions)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Any:
        return await request.json()

    @app.get("/inferscale/v1/users/{user}/facts")
    async def facts(user: str, request: Request) -> Any:
        try:
            admit_user(request, user, "user")
        except Refusal as refusal:
            return refusal.response()
        request.state.audit.action = "facts.list"
        request.state.audit.counts["facts"] = 3
        return []

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()

    app.add_middleware(FieldGuard)
    app.add_middleware(AuthMiddleware)
    return app


def keyed(folder: Path, **fields: Any) -> FastAPI:
    config = AuthConfig(mode="apiKey", keys_file=keys_file(folder), **fields)
    return application(Gate(config, SECRET))


def ask(app: FastAPI, path: str, key: str | None = None, **fields: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            method = "POST" if "json" in fields else "GET"
            return await client.request(method, path, headers=headers, **fields)

    return asyncio.run(send())


def test_without_credentials_only_what_is_open_answers(tmp_path: Path) -> None:
    app = keyed(tmp_path)
    assert ask(app, "/health").status_code == 200
    for path in ("/openapi.json", "/v1/nothing", "/inferscale/v1/users/maya/facts"):
        answer = ask(app, path)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == 'Bearer realm="inferscale"'
        assert answer.json()["error"]["type"] == "AuthenticationError"
    wrong = ask(app, "/openapi.json", "x" * 30)
    assert wrong.status_code == 401
    assert 'error="invalid_token"' in wrong.headers["www-authenticate"]
    assert "x" * 30 not in wrong.text


@pytest.mark.parametrize("value", ["", "Bearer", "Basic abc", ALL, f"Bearer{ALL}"])
def test_other_forms_of_the_header(tmp_path: Path, value: str) -> None:
    app = keyed(tmp_path)

    async def send(headers: list[tuple[str, str]]) -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get("/openapi.json", headers=headers)).status_code

    assert asyncio.run(send([("authorization", value)])) == 401
    both = [("authorization", f"Bearer {ALL}"), ("authorization", f"Bearer {MAYA}")]
    assert asyncio.run(send(both)) == 401
    assert asyncio.run(send([("Authorization", f"bearer  {ALL}")])) == 200


def test_status_has_a_part_for_everybody_but_not_for_wrong_keys(tmp_path: Path) -> None:
    app = keyed(tmp_path)
    assert ask(app, "/inferscale/v1/status").json() is None
    assert "admin" in ask(app, "/inferscale/v1/status", ALL).json()
    assert ask(app, "/inferscale/v1/status", "x" * 30).status_code == 401


def test_keys_open_their_users_and_permissions_alone(tmp_path: Path) -> None:
    app = keyed(tmp_path)
    assert ask(app, "/inferscale/v1/users/maya/facts", MAYA).status_code == 200
    other = ask(app, "/inferscale/v1/users/paul/facts", MAYA)
    assert other.status_code == 403
    assert other.json()["error"]["param"] == "user"
    assert "insufficient_scope" in other.headers["www-authenticate"]
    assert ask(app, "/inferscale/v1/users/paul/facts", READER).status_code == 200
    for key in (MAYA, READER):
        assert ask(app, "/reset_prefix_cache", key).status_code == 403
    assert ask(app, "/v1/completions", READER, json={}).status_code == 403


def test_callers_without_memory_have_salts_of_their_own(tmp_path: Path) -> None:
    app = keyed(tmp_path)
    body = {"prompt": "same", "n": 1}
    first, again = (ask(app, "/v1/completions", ALL, json=body).json() for _ in range(2))
    assert first == again
    assert first == {**body, "cache_salt": first["cache_salt"]}
    assert ask(app, "/v1/completions", MAYA, json=body).json()["cache_salt"] != first["cache_salt"]
    forged = ask(app, "/v1/completions", MAYA, json={**body, "cache_salt": first["cache_salt"]})
    assert forged.status_code == 400
    open_app = application(Gate(AuthConfig(), SECRET))
    assert ask(open_app, "/v1/completions", json=body).json() == body


def test_limits_of_keys_and_of_users(tmp_path: Path) -> None:
    app = keyed(tmp_path, limits={"key_requests_per_minute": 1, "burst": 2})
    path = "/inferscale/v1/users/maya/facts"
    assert [ask(app, path, MAYA).status_code for _ in range(3)] == [200, 200, 429]
    assert ask(app, path, READER).status_code == 200
    late = ask(app, path, MAYA)
    assert 1 <= int(late.headers["retry-after"]) <= 60
    assert late.json()["error"]["type"] == "RateLimitError"
    by_user = keyed(tmp_path, limits={"user_requests_per_minute": 1, "burst": 1})
    assert [ask(by_user, path, key).status_code for key in (MAYA, READER)] == [200, 429]
    assert ask(by_user, "/inferscale/v1/users/paul/facts", READER).status_code == 200


def test_audit_lines_tell_who_and_what_but_no_content(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    app = keyed(tmp_path, audit=str(log))
    ask(app, "/inferscale/v1/users/maya/facts", MAYA)
    ask(app, "/inferscale/v1/users/paul/facts", MAYA)
    ask(app, "/v1/completions", "x" * 30, json={"prompt": "a secret text"})
    ask(app, "/health")
    for _ in range(500):  # a thread writes the lines
        lines = log.read_text().splitlines()
        if len(lines) == 3:
            break
        asyncio.run(asyncio.sleep(0.01))
    first, second, third = map(json.loads, lines)
    assert (first["action"], first["status"], first["counts"]) == ("facts.list", 200, {"facts": 3})
    assert first["user"] == digest("maya") != second["user"]
    assert second["status"] == 403
    assert first["principal"] == second["principal"] != third["principal"]
    assert (third["principal"], third["status"]) == (None, 401)
    for word in ("maya", "paul", "secret", MAYA, "x" * 30):
        assert word not in log.read_text()


def test_nothing_is_let_in_before_the_gate_is_there() -> None:
    app = application(None)
    assert ask(app, "/health").status_code == 200
    assert ask(app, "/inferscale/v1/users/maya/facts").status_code == 503


def test_websockets_are_guarded_too(tmp_path: Path) -> None:
    client = TestClient(keyed(tmp_path))
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass
    headers = {"authorization": f"Bearer {ALL}"}
    with client.websocket_connect("/v1/realtime", headers=headers):
        pass


def test_the_first_part_of_a_path_is_not_taken_for_the_root(tmp_path: Path) -> None:
    app = keyed(tmp_path)
    app.root_path = "/health"
    assert ask(app, "/health/v1/completions", json={}).status_code == 401
