"""The memory API over real stores, one application for each replica."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from inferscale_runtime.config import AuthConfig, QuotaConfig
from inferscale_runtime.server.auth.gate import Gate
from inferscale_runtime.server.auth.middleware import AuthMiddleware
from inferscale_runtime.server.guard import FieldGuard
from inferscale_runtime.server.memory_api.answers import AnswerLog
from inferscale_runtime.server.memory_api.idempotency import Idempotency
from inferscale_runtime.server.memory_api.operations import MemoryOperations
from inferscale_runtime.server.memory_api.routes import attach_memory_api
from inferscale_runtime.server.service import MemoryService

BASE = "http://replica/inferscale/v1/users/"
Replica = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


def application(service: MemoryService, **settings: Any) -> FastAPI:
    app = FastAPI()
    state = app.state
    state.inferscale_memory = service
    state.inferscale_gate = Gate(settings.get("auth", AuthConfig()), service.secret)
    state.inferscale_operations = MemoryOperations(service, settings.get("quota", QuotaConfig()))
    state.inferscale_idempotency = Idempotency()
    state.inferscale_answers = AnswerLog()
    attach_memory_api(app)
    app.add_middleware(FieldGuard)
    app.add_middleware(AuthMiddleware)
    return app


@pytest.fixture
def replica(tmp_path: Path, kit: SimpleNamespace) -> Replica:
    """Opens a client of a replica; all replicas of a test share their stores."""
    count = 0

    @asynccontextmanager
    async def start(*stores: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        nonlocal count
        count += 1
        folder = tmp_path / f"replica-{count}"
        folder.mkdir()
        world = kit.World(folder)
        # The arena is a replica's own, the stores are everybody's.
        world.folder = tmp_path
        for name in stores or ("main",):
            kit.add_encoding(world.store(name))
        service = world.service(*(stores or ("main",)))
        transport = httpx.ASGITransport(application(service, **settings))
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
            client.service = service  # type: ignore[attr-defined]
            yield client

    return start
