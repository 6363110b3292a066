"""Closed and open loop on simulated time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from inferscale_runtime.bench.client import Ask
from inferscale_runtime.bench.report import BenchError
from inferscale_runtime.bench.run import plan_loads
from inferscale_runtime.bench.throughput import Load, Traffic
from inferscale_runtime.bench.workload import Workload, ZipfUsers


@dataclass
class SimulatedTime:
    """Time moves on only when every task waits for it."""

    now: float = 0.0
    waiting: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    count: int = 0

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.count += 1
        heapq.heappush(self.waiting, (self.now + seconds, self.count, future))
        await future

    async def run(self, work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if not task.done():
                due, _, future = heapq.heappop(self.waiting)
                self.now = due
                future.set_result(None)
        return task.result()


class Server:
    """Answers after a fixed time, one request after the other or all at once."""

    def __init__(self, time: SimulatedTime, seconds: float, serial: bool = False) -> None:
        self.time, self.seconds = time, seconds
        self.lock = asyncio.Lock() if serial else None
        self.asked: list[tuple[float, Ask]] = []
        self.open: set[str] = set()
        self.peak = 0

    async def send(self, ask: Ask) -> tuple[float, str]:
        assert ask.user not in self.open, "two open requests of one user"
        self.open.add(ask.user)
        self.peak = max(self.peak, len(self.open))
        start = self.time.now
        self.asked.append((start, ask))
        if self.lock is not None:
            async with self.lock:
                await self.time.sleep(self.seconds)
        else:
            await self.time.sleep(self.seconds)
        self.open.discard(ask.user)
        return self.time.now - start, "text" if ask.user == "u0" else ask.mode


USERS = [f"u{number}" for number in range(6)]
WORK = Workload([], USERS, {user: ["one?", "two?"] for user in USERS})


def traffic(server: Server) -> Traffic:
    template = Ask("", "", 3, "injected")
    users = ZipfUsers(USERS, 1.0, seed=4)
    clock = server.time
    return Traffic(server.send, template, WORK, users, lambda: clock.now, clock.sleep)


def simulate(run: Callable[[SimulatedTime], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        time = SimulatedTime()
        return await time.run(run(time))

    return asyncio.run(main())


def test_closed_loop_keeps_n_requests_open() -> None:
    async def run(time: SimulatedTime) -> None:
        server = Server(time, seconds=2.0)
        work = traffic(server)
        assert await work.closed_loop(concurrency=3, requests=9) == 6.0
        assert server.peak == work.tally.in_flight_peak == 3
        assert work.tally.ttft_s == [2.0] * 9
        asked = [(ask.user, ask.question) for _, ask in server.asked]
        assert len(set(asked)) == 9, "no question twice"
        assert work.tally.as_text == sum(user == "u0" for user, _ in asked)

    simulate(run)


def test_open_loop_does_not_wait_for_answers() -> None:
    async def run(time: SimulatedTime) -> None:
        server = Server(time, seconds=10.0)
        work = traffic(server)
        assert await work.open_loop([1.0, 2.0, 4.5]) == 14.5
        assert [start for start, _ in server.asked] == [1.0, 2.0, 4.5]
        assert work.tally.in_flight_peak == 3

    simulate(run)


def test_open_loop_counts_the_queue() -> None:
    async def run(time: SimulatedTime) -> None:
        work = traffic(Server(time, seconds=3.0, serial=True))
        await work.open_loop([0.0, 1.0, 2.0])
        assert work.tally.ttft_s == [3.0, 5.0, 7.0]

    simulate(run)


def test_open_loop_says_when_users_run_out() -> None:
    async def run(time: SimulatedTime) -> None:
        work = traffic(Server(time, seconds=100.0))
        with pytest.raises(ExceptionGroup) as caught:
            await work.open_loop([float(n) for n in range(7)])
        assert caught.group_contains(BenchError, match="all 6 users have an open request")

    simulate(run)


def test_the_cold_row_comes_first_and_only_for_injection() -> None:
    assert plan_loads(["injected", "text"], [1, 10], None, None) == [
        Load("injected", "cold", 10, 20),
        Load("injected", "warm", 1, 10),
        Load("text", "warm", 1, 10),
        Load("injected", "warm", 10, 20),
        Load("text", "warm", 10, 20),
    ]
    assert plan_loads(["text"], [5], 7, None) == [Load("text", "warm", 5, 7)]
    assert plan_loads(["injected"], [1, 4], 9, 2.5) == [
        Load("injected", "cold", 4, 9, 2.5),
        Load("injected", "warm", 4, 9, 2.5),
    ]
