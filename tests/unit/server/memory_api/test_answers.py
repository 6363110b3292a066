"""What is remembered of the last answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from inferscale_runtime.server.memory_api.answers import (
    MAX_ANSWERS,
    MAX_USERS,
    AnswerLog,
    begin_record,
    timed_stream,
)
from inferscale_runtime.server.options import MemoryUsage

USAGE = MemoryUsage("injected", facts=1, injected_tokens=7, fact_ids=("a",), store="s")


def test_the_newest_answers_of_each_user_are_kept() -> None:
    log = AnswerLog()
    records = [begin_record(USAGE) for _ in range(MAX_ANSWERS + 5)]
    for record in records:
        log.add("s", "u", record)
    assert log.of("s", "u") == records[:4:-1]
    assert log.of("other", "u") == []
    for n in range(MAX_USERS):
        log.add("s", str(n), records[0])
    assert log.of("s", "u") == []
    log.forget("s", "1")
    assert log.of("s", "1") == []


def test_a_stream_gives_the_time_of_its_first_token_and_its_end() -> None:
    async def chunks() -> AsyncGenerator[str, None]:
        yield ": keep-alive\n\n"
        yield 'data: {"choices": []}\n\n'
        yield "data: [DONE]\n\n"

    async def scenario() -> None:
        record = begin_record(USAGE)
        stream = timed_stream(chunks(), record, time.perf_counter())
        assert await anext(stream) == ": keep-alive\n\n"
        assert record.ttft_seconds is None
        await anext(stream)
        assert record.ttft_seconds is not None
        assert record.seconds is None
        # A client that leaves ends it too.
        await stream.aclose()
        assert record.seconds is not None
        assert record.seconds >= record.ttft_seconds

    asyncio.run(scenario())


def test_facts_are_named_only_when_asked_for() -> None:
    assert "fact_ids" not in USAGE.as_dict()
    assert MemoryUsage("none", explain=True).as_dict()["fact_ids"] == ()
