"""ASGI middleware that stands before every route."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from inferscale_runtime.server.auth.access import Access, required_access
from inferscale_runtime.server.auth.audit import AuditRecord
from inferscale_runtime.server.auth.gate import Gate
from inferscale_runtime.server.auth.principal import Principal
from inferscale_runtime.server.guard import Message, Receive, Scope, Send
from inferscale_runtime.server.refusal import Refusal

NO_ANSWER = 499
"""Status in the audit log when the client left before the answer began."""


class AuthMiddleware:
    """Authenticates requests, and writes the audit log.

    Routes find the caller in ``request.state.principal`` (None where nobody had to be, and was,
    authenticated) and fill in ``request.state.audit``.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through or answers it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        method = scope.get("method", "WEBSOCKET")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        access = required_access(method, path)
        state = scope.setdefault("state", {})
        record = state["audit"] = AuditRecord(action=access)
        state["principal"] = None
        if access == "open":
            await self._app(scope, receive, send)
            return
        gate: Gate | None = getattr(scope["app"].state, "inferscale_gate", None)
        status = NO_ANSWER

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        principal: Principal | None = None
        try:
            if gate is None:
                raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the server is starting; try again")
            principal = state["principal"] = await _admit(gate, access, scope)
            if principal is not None:
                state["salt"] = gate.salt(principal)
            await self._app(scope, receive, watched)
        except Refusal as refusal:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": refusal.message})
            else:
                await refusal.response()(scope, receive, watched)
        finally:
            if gate is not None and gate.audit is not None and access != "figures":
                gate.audit.write(principal.id if principal else None, method, status, record)


async def _admit(gate: Gate, access: Access, scope: Scope) -> Principal | None:
    values = [v.decode("latin-1") for k, v in scope["headers"] if k.lower() == b"authorization"]
    if access == "figures" and not values:
        return None
    principal = await gate.authenticate(values)
    gate.admit(principal, access)
    return principal
