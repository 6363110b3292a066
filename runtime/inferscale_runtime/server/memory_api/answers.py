"""The last answers that used each user's memory, for the web page; in memory only."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime

from inferscale_runtime.server.options import MemoryUsage

MAX_ANSWERS = 20
MAX_USERS = 4096


@dataclass(slots=True)
class AnswerRecord:
    """How memory was used in one answer; holds no text.

    Attributes:
        time: When the request came, ISO 8601 in UTC.
        mode: As in ``usage.memory``.
        injected_tokens: As there.
        text_tokens: As there.
        reason: As there.
        fact_ids: Facts in the prompt, in its order.
        ttft_seconds: Until the first token of a streamed answer.
        seconds: Until the end.
    """

    time: str
    mode: str
    injected_tokens: int
    text_tokens: int
    reason: str | None
    fact_ids: tuple[str, ...]
    ttft_seconds: float | None = None
    seconds: float | None = None


def begin_record(usage: MemoryUsage) -> AnswerRecord:
    """The record of an answer that is about to be made."""
    return AnswerRecord(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        mode=usage.mode,
        injected_tokens=usage.injected_tokens,
        text_tokens=usage.text_tokens,
        reason=usage.reason,
        fact_ids=usage.fact_ids,
    )


async def timed_stream(
    chunks: AsyncGenerator[str, None], record: AnswerRecord, started: float
) -> AsyncGenerator[str, None]:
    """Hands chunks on and takes their times.

    Args:
        chunks: Of the answer; vLLM sends the first one with the first token.
        record: Gets the times.
        started: When the request came, of ``time.perf_counter``.
    """
    try:
        async for chunk in chunks:
            if record.ttft_seconds is None and chunk.startswith("data: {"):
                record.ttft_seconds = round(time.perf_counter() - started, 6)
            yield chunk
    finally:
        record.seconds = round(time.perf_counter() - started, 6)


class AnswerLog:
    """A short list for each user; event loop of the API process."""

    def __init__(self) -> None:
        self._users: OrderedDict[tuple[str, str], deque[AnswerRecord]] = OrderedDict()

    def add(self, store: str, user: str, record: AnswerRecord) -> None:
        """Adds one; the oldest of this user, or the least recent user, is forgotten."""
        name = (store, user)
        self._users.setdefault(name, deque(maxlen=MAX_ANSWERS)).append(record)
        self._users.move_to_end(name)
        if len(self._users) > MAX_USERS:
            self._users.popitem(last=False)

    def of(self, store: str, user: str) -> list[AnswerRecord]:
        """A user's, the newest first."""
        return list(reversed(self._users.get((store, user), ())))

    def forget(self, store: str, user: str) -> None:
        """Forgets a user."""
        self._users.pop((store, user), None)
