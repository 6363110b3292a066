"""``inferscale bench throughput``: many distinct users at once.

Closed loop: each of n clients sends its next request when its last one is answered. Open loop:
requests come at random times that no answer delays, and a request's time counts from its due
moment. Two open requests never belong to the same user.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from inferscale_runtime.bench.client import Ask, ChatClient
from inferscale_runtime.bench.report import BenchError, Row
from inferscale_runtime.bench.server import say
from inferscale_runtime.bench.stats import summary
from inferscale_runtime.bench.workload import Workload, ZipfUsers, poisson_arrivals

COLUMNS = (
    ("mode", "mode"),
    ("state", "state"),
    ("loop", "loop"),
    ("concurrency", "users at once"),
    ("rate_per_s", "rate /s"),
    ("requests", "requests"),
    ("queries_per_s", "queries/s"),
    ("ttft_p50_ms", "TTFT p50 ms"),
    ("ttft_p95_ms", "p95"),
    ("ttft_p99_ms", "p99"),
    ("as_text", "sent as text"),
)

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


@dataclass(slots=True)
class Tally:
    """What a run gave.

    Attributes:
        ttft_s: Times to first token, from the due moment.
        as_text: Answers that were asked for with injection and came as text.
        in_flight_peak: Most requests that were open at once.
    """

    ttft_s: list[float] = field(default_factory=list)
    as_text: int = 0
    in_flight_peak: int = 0


class Traffic:
    """Sends requests of distinct users.

    Args:
        send: Sends one request and gives ``(TTFT in seconds, mode that was used)``.
        template: k, mode and max_tokens of the requests.
        workload: Users and questions.
        users: Draws users.
        clock: Seconds.
        sleep: Waits.
    """

    def __init__(
        self,
        send: Callable[[Ask], Awaitable[tuple[float, str]]],
        template: Ask,
        workload: Workload,
        users: ZipfUsers,
        clock: Clock = time.perf_counter,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._send = send
        self._template = template
        self._users = users
        self._clock = clock
        self._sleep = sleep
        self._questions = _endless(workload.questions)
        self._workload_users = workload.users
        self._busy: set[str] = set()
        self.tally = Tally()

    async def closed_loop(self, concurrency: int, requests: int) -> float:
        """Runs n clients until all requests are answered; returns the seconds it took."""
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                await self._one(self._clock())

        start = self._clock()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
        return self._clock() - start

    async def open_loop(self, arrivals: Sequence[float]) -> float:
        """Sends requests at their times, in seconds from now; returns the seconds it took."""
        start = self._clock()
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                wait = start + arrival - self._clock()
                if wait > 0:
                    await self._sleep(wait)
                group.create_task(self._one(start + arrival))
        return self._clock() - start

    async def _one(self, due: float) -> None:
        if len(self._busy) >= len(self._workload_users):
            raise BenchError(
                f"all {len(self._workload_users)} users have an open request: the server falls "
                "behind; lower --rate or raise --users"
            )
        user = self._users.draw(self._busy)
        self._busy.add(user)
        self.tally.in_flight_peak = max(self.tally.in_flight_peak, len(self._busy))
        try:
            sent = self._clock()
            ttft, mode = await self._send(
                replace(self._template, user=user, question=next(self._questions[user]))
            )
        finally:
            self._busy.discard(user)
        self.tally.ttft_s.append(sent - due + ttft)
        self.tally.as_text += mode != self._template.mode


def _endless(questions: dict[str, list[str]]) -> dict[str, Iterator[str]]:
    """Each user's questions, numbered on when they are used up, so that none is asked twice."""

    def numbered(asked: list[str]) -> Iterator[str]:
        number = 0
        while True:
            yield f"{asked[number % len(asked)]} ({number + 1})"
            number += 1

    return {user: numbered(asked) for user, asked in questions.items()}


@dataclass(frozen=True, slots=True)
class Load:
    """One row's traffic.

    Attributes:
        mode: ``injected`` or ``text``.
        state: ``cold`` (no fact is in memory yet) or ``warm``.
        concurrency: Clients of the closed loop.
        requests: How many requests in all.
        rate: Arrivals a second of the open loop, or None for the closed loop.
    """

    mode: str
    state: str
    concurrency: int
    requests: int
    rate: float | None = None


def _first(group: BaseExceptionGroup[BenchError]) -> BenchError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BenchError)
    return error


async def measure(
    client: ChatClient, workload: Workload, load: Load, template: Ask, exponent: float, seed: int
) -> Row:
    """Measures one row."""

    async def send(ask: Ask) -> tuple[float, str]:
        answer = await client.ask(ask, check=False)
        return answer.ttft_s, str(answer.memory.get("mode"))

    say(f"{load.mode}, {load.state}: {load.requests} requests, {load.concurrency} at once")
    users = ZipfUsers(workload.users, exponent, seed)
    traffic = Traffic(send, replace(template, mode=load.mode), workload, users)
    try:
        if load.rate is None:
            seconds = await traffic.closed_loop(load.concurrency, load.requests)
        else:
            seconds = await traffic.open_loop([*poisson_arrivals(load.rate, load.requests, seed)])
    except* BenchError as group:
        # One reason is enough: when the server goes away, every open request says so.
        raise _first(group) from None
    tally = traffic.tally
    return {
        "mode": load.mode,
        "state": load.state,
        "loop": "closed" if load.rate is None else "open",
        "concurrency": load.concurrency if load.rate is None else tally.in_flight_peak,
        "rate_per_s": load.rate,
        "requests": load.requests,
        "seconds": round(seconds, 3),
        "queries_per_s": round(load.requests / seconds, 3),
        "as_text": tally.as_text,
        **summary(tally.ttft_s, "ttft"),
    }
