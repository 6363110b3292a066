"""Fields that only the server may set."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from inferscale_runtime.server.guard import FieldGuard, forbidden_field

Event = MutableMapping[str, Any]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"kv_transfer_params": {}}', "kv_transfer_params"),
        (b'{"cache_salt": "x"}', "cache_salt"),
        (b'{"cache\\u005fsalt": "x"}', "cache_salt"),
        (b'{"vllm_xargs": {"kv_transfer_params": {"a": 1}}}', "vllm_xargs.kv_transfer_params"),
        (b'{"vllm_xargs": {"a": {"cache_salt": "x"}}}', "vllm_xargs.cache_salt"),
        (b'{"vllm_xargs": {"\\u0063ache_salt": "x"}}', "vllm_xargs.cache_salt"),
        (b'{"sampling_params": {"extra_args": {"cache_salt": "x"}}}', "sampling_params.cache_salt"),
        (b'\xef\xbb\xbf{"cache_salt": "x"}', "cache_salt"),
    ],
)
def test_found(body: bytes, field: str) -> None:
    assert forbidden_field(body) == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'["cache_salt"]',
        b'{"cache_salt": null}',
        b'{"messages": [{"role": "user", "content": "what is cache_salt?"}]}',
        b'{"memory": {"user": "cache_salt"}}',
        b"[" * 100_000 + b'"cache_salt"',
    ],
)
def test_left_alone(body: bytes) -> None:
    assert forbidden_field(body) is None


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_of_json_are_searched_too(encoding: str) -> None:
    assert forbidden_field('{"cache_salt": "x"}'.encode(encoding)) == "cache_salt"


def test_deep_nesting_is_no_server_error() -> None:
    body = b'{"vllm_xargs":' + b'{"a":' * 900 + b'{"cache_salt":"x"}' + b"}" * 901
    assert forbidden_field(body) == "vllm_xargs.cache_salt"


async def _call(events: list[Event], method: str = "POST") -> tuple[bytes, list[Event], int]:
    """Sends events through the guard; returns what the app read, what came back, app calls."""
    read, sent, calls = bytearray(), [], 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        calls += 1
        while True:
            event = await receive()
            read.extend(event.get("body", b""))
            if not event.get("more_body"):
                break
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def receive() -> Event:
        return events.pop(0) if events else {"type": "http.disconnect"}

    async def send(event: Event) -> None:
        sent.append(event)

    await FieldGuard(app)({"type": "http", "method": method, "headers": []}, receive, send)
    return bytes(read), sent, calls


def chunks(*parts: bytes) -> list[Event]:
    return [
        {"type": "http.request", "body": part, "more_body": n + 1 < len(parts)}
        for n, part in enumerate(parts)
    ]


def test_a_body_in_parts_is_handed_on_whole() -> None:
    read, sent, calls = asyncio.run(_call(chunks(b'{"model": ', b'"m"', b"}")))
    assert (read, calls, sent[0]["status"]) == (b'{"model": "m"}', 1, 200)


def test_a_field_split_over_parts_is_refused_by_name() -> None:
    _, sent, calls = asyncio.run(_call(chunks(b'{"cache_', b'salt": "x"}')))
    assert calls == 0
    assert sent[0]["status"] == 400
    error = json.loads(sent[1]["body"])["error"]
    assert error["param"] == "cache_salt"
    assert "cache_salt" in error["message"]


def test_other_methods_are_not_read() -> None:
    read, _, calls = asyncio.run(_call(chunks(b'{"cache_salt": "x"}'), "GET"))
    assert (read, calls) == (b'{"cache_salt": "x"}', 1)
