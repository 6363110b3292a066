"""``POST /v1/chat/completions``: the stock handler with a planned prompt.

Everything that is not memory (tools, streaming, logprobs, reasoning) stays with vLLM's handler,
which takes the prompt's token ids from ``kv_transfer_params.prompt_token_ids``.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from inferscale_runtime import tracing
from inferscale_runtime.errors import StoreError
from inferscale_runtime.prompt.template import Message
from inferscale_runtime.server.auth.audit import AuditRecord
from inferscale_runtime.server.auth.gate import admit_user
from inferscale_runtime.server.canary import Canary
from inferscale_runtime.server.memory_api.answers import (
    AnswerLog,
    AnswerRecord,
    begin_record,
    timed_stream,
)
from inferscale_runtime.server.options import MemoryOptions
from inferscale_runtime.server.refusal import (
    Refusal,
    error_response,
    unknown_store,
    unknown_user,
)
from inferscale_runtime.server.service import MemoryService, Prepared, UnknownUserError
from inferscale_runtime.server.stores import UnknownStoreError
from inferscale_runtime.server.watched import ARRIVAL, WATCH, Watch


class MemoryChatRequest(ChatCompletionRequest):
    """vLLM's chat request with a ``memory`` object."""

    memory: MemoryOptions | None = None


def text_messages(messages: list[Any]) -> list[Message]:
    """Messages with their text parts joined.

    Raises:
        ValueError: For images and the like.
    """
    result: list[Message] = []
    for item in messages:
        message: Message = dict(item) if isinstance(item, dict) else item.model_dump()
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            parts = []
            for part in content:
                if not isinstance(part, dict) or part.get("type") not in ("text", None):
                    raise ValueError("messages")
                parts.append(str(part.get("text", "")))
            message["content"] = "".join(parts)
        result.append({key: value for key, value in message.items() if value is not None})
    return result


def template_arguments(request: ChatCompletionRequest) -> dict[str, Any]:
    """Chat template arguments of a request."""
    arguments: dict[str, Any] = dict(request.chat_template_kwargs or {})
    arguments["add_generation_prompt"] = request.add_generation_prompt
    if request.continue_final_message:
        arguments["continue_final_message"] = True
    if request.tools and request.tool_choice != "none":
        arguments["tools"] = [tool.model_dump() for tool in request.tools]
    if request.documents:
        arguments["documents"] = request.documents
    return arguments


def refuse(request: MemoryChatRequest) -> JSONResponse | None:
    """Combinations that cannot work with memory."""
    for field in ("echo", "chat_template"):
        if getattr(request, field, None):
            return error_response(
                f"field '{field}': it cannot be combined with 'memory'; leave one of them out",
                field,
                HTTPStatus.BAD_REQUEST,
            )
    return None


def blocked_reason(request: MemoryChatRequest) -> str | None:
    """Request options under which nothing can be injected."""
    if (request.n or 1) > 1:
        # The samples are requests of their own in the engine and would share one lease.
        return "several_samples"
    if request.prompt_logprobs is not None:
        return "prompt_logprobs"
    if getattr(request, "use_beam_search", False):
        return "beam_search"
    return None


async def stream_with_usage(
    generator: AsyncGenerator[str, None], prepared: Prepared
) -> AsyncGenerator[str, None]:
    """Adds ``usage.memory`` to the chunks that carry usage."""
    usage = prepared.usage.as_dict()
    async for chunk in generator:
        if '"usage":{' in chunk and chunk.startswith("data: {"):
            body = json.loads(chunk[len("data: ") :])
            if isinstance(body.get("usage"), dict):
                body["usage"]["memory"] = usage
                chunk = f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
        yield chunk


class LeasedStream(StreamingResponse):
    """A streamed answer that ends its lease even if the client left before the first chunk."""

    def __init__(self, content: Any, end: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the stream, then ends the lease however the sending went."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _prepare(
    service: MemoryService,
    request: MemoryChatRequest,
    options: MemoryOptions,
    raw_request: Request,
) -> Prepared | JSONResponse:
    try:
        # Before anything is looked up: an answer must not tell whether somebody else's memory is.
        admit_user(raw_request, options.user, "memory.user")
    except Refusal as refusal:
        return refusal.response()
    refused = refuse(request)
    if refused is not None:
        return refused
    try:
        messages = text_messages(list(request.messages))
    except ValueError:
        return error_response(
            "field 'messages': only text can be combined with 'memory'; send media without it",
            "messages",
            HTTPStatus.BAD_REQUEST,
        )
    request.messages = messages  # a one-shot iterator may have been consumed
    try:
        prepared = await service.prepare(
            options, messages, template_arguments(request), blocked_reason(request)
        )
        _note(raw_request.state.audit, prepared)
        return prepared
    except UnknownUserError:
        return unknown_user("memory.user").response()
    except UnknownStoreError as error:
        return unknown_store("memory.store", error.known).response()
    except StoreError:
        return error_response(
            "field 'memory.user': the memory of this user cannot be read; see 'inferscale store "
            "verify'",
            "memory.user",
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )


def _note(record: AuditRecord, prepared: Prepared) -> None:
    record.action, record.store = "chat.memory", prepared.usage.store
    record.counts["facts"] = prepared.usage.facts


def _remember(request: Request, prepared: Prepared) -> AnswerRecord:
    record = begin_record(prepared.usage)
    log: AnswerLog = request.app.state.inferscale_answers
    if prepared.usage.store is not None:
        log.add(prepared.usage.store, request.state.audit.user, record)
    return record


def _offer_to_canary(
    raw_request: Request,
    request: MemoryChatRequest,
    options: MemoryOptions | None,
    prepared: Prepared | None,
    result: Any,
) -> None:
    if options is None or prepared is None or isinstance(result, ErrorResponse):
        return
    canary: Canary = raw_request.app.state.inferscale_canary
    canary.offer(
        options,
        lambda: (text_messages(list(request.messages)), template_arguments(request)),
        prepared,
    )


def _watch(raw_request: Request, prepared: Prepared) -> None:
    """The request's mode for its span and for the time to its first token."""
    usage = prepared.usage
    WATCH.set(Watch(usage.mode, raw_request.scope.get(ARRIVAL, time.time())))
    tracing.annotate(
        mode=usage.mode,
        facts=usage.facts,
        injected_tokens=usage.injected_tokens,
        text_tokens=usage.text_tokens,
        tier=usage.tier,
        reason=usage.reason,
        store=usage.store,
    )


def attach_chat(app: FastAPI) -> None:
    """Replaces the stock route."""

    @app.post("/v1/chat/completions", dependencies=[Depends(validate_json_request)])
    @with_cancellation
    @load_aware_call
    async def create_chat_completion(request: MemoryChatRequest, raw_request: Request) -> Any:
        started = time.perf_counter()
        service: MemoryService = raw_request.app.state.inferscale_memory
        handler = raw_request.app.state.inferscale_chat
        options, request.memory = request.memory, None
        prepared: Prepared | None = None
        if options is not None:
            outcome = await _prepare(service, request, options, raw_request)
            if isinstance(outcome, JSONResponse):
                return outcome
            prepared = outcome
            _watch(raw_request, prepared)
            request.cache_salt = prepared.salt
            if prepared.token_ids is not None:
                request.kv_transfer_params = {
                    "prompt_token_ids": prepared.token_ids,
                    **prepared.params,
                }
        try:
            result = await handler.create_chat_completion(request, raw_request)
        except BaseException as error:
            if prepared is not None:
                # A cancelled request may be in the engine; a refused one never got there.
                service.end(prepared, submitted=not isinstance(error, Exception))
            raise
        _offer_to_canary(raw_request, request, options, prepared, result)
        if isinstance(result, ErrorResponse):
            if prepared is not None:
                service.end(prepared, submitted=False)
            return JSONResponse(result.model_dump(), status_code=result.error.code)
        if isinstance(result, ChatCompletionResponse):
            body = result.model_dump()
            if prepared is not None:
                service.end(prepared)
                body["usage"]["memory"] = prepared.usage.as_dict()
                _remember(raw_request, prepared).seconds = round(time.perf_counter() - started, 6)
            return JSONResponse(body)
        arguments = getattr(raw_request.app.state, "args", None)
        interval = float(getattr(arguments, "sse_keep_alive_interval", 0))
        if prepared is None:
            stream = with_sse_keep_alive(result, interval)
            return StreamingResponse(stream, media_type="text/event-stream")
        timed = timed_stream(result, _remember(raw_request, prepared), started)
        stream = with_sse_keep_alive(stream_with_usage(timed, prepared), interval)
        # The names of the facts would be too long for a header.
        usage = replace(prepared.usage, explain=False)
        headers = {"x-inferscale-memory": json.dumps(usage.as_dict())}
        return LeasedStream(stream, partial(service.end, prepared), headers)
