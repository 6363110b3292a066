"""Endpoint plugin: vLLM calls it in the API process (``vllm.endpoint_plugins``)."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from inferscale_runtime.config import RuntimeConfig
from inferscale_runtime.encode.model import kv_dimensions, resolve_model
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.fingerprint import model_digest
from inferscale_runtime.server import metrics
from inferscale_runtime.server.auth.gate import Gate
from inferscale_runtime.server.auth.middleware import AuthMiddleware
from inferscale_runtime.server.auth.principal import Principal
from inferscale_runtime.server.canary import Canary
from inferscale_runtime.server.chat import attach_chat
from inferscale_runtime.server.guard import FieldGuard
from inferscale_runtime.server.http_trace import TraceMiddleware
from inferscale_runtime.server.identity import Identity, embedder_name, find_identity
from inferscale_runtime.server.memory_api.answers import AnswerLog
from inferscale_runtime.server.memory_api.idempotency import Idempotency
from inferscale_runtime.server.memory_api.operations import MemoryOperations
from inferscale_runtime.server.memory_api.routes import attach_memory_api
from inferscale_runtime.server.page.routes import attach_page
from inferscale_runtime.server.readiness import Readiness, keep_swept
from inferscale_runtime.server.service import MemoryService
from inferscale_runtime.server.status import StatusPage, public_part
from inferscale_runtime.server.stores import Embedders, ServedStore
from inferscale_runtime.server.watched import watched_handler
from inferscale_runtime.store.store import Store
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.form import SlabForm
from inferscale_runtime.tiers.report import start_tiers
from inferscale_runtime.tiers.slab import (
    SlabShape,
    create_run_files,
    enter_pages,
    load_secret,
    map_leases,
    map_slab,
    map_stamps,
)


class MemoryEndpointPlugin:
    """Adds memory to the stock API server."""

    name = "inferscale_memory"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Replaces the chat route, guards the others, adds the status route and the web page."""
        attach_chat(app)
        attach_page(app)
        attach_memory_api(app)
        app.add_middleware(FieldGuard)
        app.add_middleware(AuthMiddleware)  # before the guard: what is added last stands first
        app.add_middleware(TraceMiddleware)

        @app.get("/inferscale/v1/status")
        async def status(raw_request: Request) -> dict[str, Any]:
            page: StatusPage = raw_request.app.state.inferscale_status
            body = {**await page.body(), **raw_request.app.state.inferscale_tiers.status()}
            caller: Principal | None = raw_request.state.principal
            return body if caller and "admin" in caller.permissions else public_part(body)

        @app.get("/inferscale/v1/ready")
        async def ready(raw_request: Request) -> JSONResponse:
            readiness: Readiness | None = getattr(
                raw_request.app.state, "inferscale_readiness", None
            )
            reason = readiness.reason if readiness else "starting"
            return JSONResponse(
                {"ready": reason is None, "reason": reason}, 200 if reason is None else 503
            )

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Opens the stores, makes the arena and finds the encodings for the running model."""
        if engine_client is None:
            return
        if (getattr(args, "api_server_count", None) or 1) > 1:
            raise ConfigError(
                f"--api-server-count {args.api_server_count}: the arena has one writer; use 1 and "
                "more replicas"
            )
        vllm_config = engine_client.vllm_config
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = RuntimeConfig.model_validate(extra["inferscale"])
        tokenizer = state.openai_serving_chat.renderer.tokenizer
        template = getattr(state.openai_serving_chat.online_renderer, "chat_template", None)
        service = await asyncio.to_thread(build_service, config, vllm_config, tokenizer, template)
        atexit.register(shutil.rmtree, config.run_dir, ignore_errors=True)
        canary = Canary(service, engine_client, config.canary)
        readiness = Readiness(service, engine_client, config.tiers, canary)
        state.inferscale_memory = service
        state.inferscale_operations = MemoryOperations(service, config.quota)
        state.inferscale_idempotency = Idempotency()
        state.inferscale_answers = AnswerLog()
        state.inferscale_gate = await asyncio.to_thread(Gate, config.auth, service.secret)
        state.inferscale_chat = watched_handler(state.openai_serving_chat)
        state.inferscale_readiness = readiness
        state.inferscale_tiers = start_tiers(
            service.arena, config.tiers.plan_file, Path(config.run_dir)
        )
        state.inferscale_canary = canary
        state.inferscale_status = StatusPage(service, readiness, canary=canary)
        state.inferscale_keep = asyncio.create_task(readiness.keep())
        state.inferscale_sweep = asyncio.create_task(keep_swept(service))


def _make_arena(config: RuntimeConfig, vllm_config: Any) -> Arena:
    kv_dtype = config.encoding.kv_dtype
    one_row = SlabShape(num_rows=1, **kv_dimensions(vllm_config), kv_dtype=kv_dtype)
    rows = max(1, config.tiers.dram_bytes // one_row.row_bytes)
    shape = replace(one_row, num_rows=rows)
    folder = Path(config.run_dir)
    create_run_files(folder, shape)
    slab = map_slab(folder, shape)
    enter_pages(slab, write=True)
    arena = Arena(
        slab,
        map_leases(folder),
        stamps=map_stamps(folder, shape),
        form=SlabForm(shape, folder),
    )
    metrics.ARENA_BUDGET_BYTES.set_function(lambda: arena.budget_bytes)
    metrics.ARENA_USED_BYTES.set_function(lambda: arena.used_rows * shape.row_bytes)
    metrics.ARENA_PINNED_BYTES.set_function(lambda: arena.pinned_rows * shape.row_bytes)
    metrics.EVICTIONS.set_function(lambda: arena.evictions)
    return arena


def build_service(
    config: RuntimeConfig, vllm_config: Any, tokenizer: Any, chat_template: str | None
) -> MemoryService:
    """Opens the stores and makes the arena; blocks.

    Args:
        config: The server's settings.
        vllm_config: vLLM's configuration.
        tokenizer: The model's.
        chat_template: Template text that replaces the tokenizer's own, or None.
    """
    model = vllm_config.model_config
    # vLLM gives a local folder a revision too when it is asked to.
    revision = None if Path(model.model).is_dir() else model.revision
    digest = model_digest(resolve_model(model.model, revision))
    arena = _make_arena(config, vllm_config)
    # The embedder and the engine share the processor. More threads than idle cores only wait for
    # each other: on two cores planning took 25 to 145 ms instead of 21 to 58 (measured).
    torch.set_num_threads(max(1, min(4, (os.cpu_count() or 2) // 2)))
    embedders = Embedders(config.retrieval.embedder_api_key_file or None)
    if config.retrieval.embedder:
        # Named by whoever started the server: a wrong name must not start one without search.
        embedders.get(config.retrieval.embedder)
    timeout = config.tiers.stage_timeout_ms / 1000
    stores = {entry.name: ServedStore(entry, arena, timeout) for entry in config.store_entries}

    def find(store: Store, expected: str | None) -> Identity:
        return find_identity(store, config, vllm_config, digest, tokenizer, chat_template, expected)

    def refresh() -> None:
        for served in stores.values():
            served.refresh(find, lambda found: embedder_name(config, found.embedder), embedders)

    refresh()
    return MemoryService(config, stores, arena, load_secret(Path(config.run_dir)), refresh)
