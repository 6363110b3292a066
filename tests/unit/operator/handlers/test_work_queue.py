from __future__ import annotations

import asyncio

import pytest

from inferscale_operator.handlers.work_queue import WorkQueue

pytestmark = pytest.mark.asyncio
A, B, C = (("MemoryStore", "ns", name) for name in "abc")


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


async def test_a_key_is_in_it_once_and_first_come_is_first_served() -> None:
    queue = WorkQueue()
    for key in (A, B, A, C, B):
        queue.add(key)
    assert queue.depth == 3
    assert [await queue.get() for _ in range(3)] == [A, B, C]


async def test_one_worker_at_a_time_has_a_key() -> None:
    queue = WorkQueue()
    queue.add(A)
    assert await queue.get() == A
    queue.add(A)
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.done(A)
    assert await waiting == A


async def test_busy_key_does_not_hold_others_up() -> None:
    queue = WorkQueue()
    queue.add(A)
    queue.add(B)
    await queue.get()
    queue.add(A)
    queue.done(A)
    assert await queue.get() == B


async def test_backoff_grows_to_its_bound_and_starts_anew_after_a_success() -> None:
    queue = WorkQueue(jitter=lambda: 1.0)
    waits = [queue.retry(A) for _ in range(12)]
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    assert waits[-1] == 300.0
    queue.succeeded(A)
    assert queue.retry(A) == 1.0


async def test_jitter_takes_up_to_half_off_and_the_server_is_obeyed() -> None:
    queue = WorkQueue(jitter=lambda: 0.0)
    assert queue.retry(A) == 0.5
    assert queue.retry(B, at_least=9.0) == 9.0


async def test_earlier_of_two_delays_counts() -> None:
    queue = WorkQueue()
    queue.add_after(A, 0.01)
    queue.add_after(A, 1000)
    assert await asyncio.wait_for(queue.get(), 5) == A


async def test_add_makes_a_delay_needless() -> None:
    queue = WorkQueue()
    queue.add_after(A, 1000)
    queue.add(A)
    assert await queue.get() == A
    assert not queue._timers


async def test_forgotten_key_does_not_come_back() -> None:
    queue = WorkQueue()
    queue.add_after(A, 1000)
    queue.forget(A)
    assert not queue._timers


async def test_closed_queue_hands_nothing_out() -> None:
    queue = WorkQueue()
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add(A)
    queue.close()
    assert await queue.get() is None
    assert await waiting in (A, None)


async def test_long_queue_alone_does_not_count_as_hung() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    queue.add(B)
    await queue.get()
    clock.time = 599.0
    queue.done(A)
    clock.time = 700.0
    assert queue.age_seconds == 700.0
    assert queue.hung(600) is None
    clock.time = 1300.0
    assert queue.hung(600) == "1 keys wait and none was finished for 701 s"


async def test_worker_that_does_not_come_back_counts_as_hung() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    await queue.get()
    clock.time = 601.0
    assert queue.hung(600) == "MemoryStore ns/a has been worked at for 601 s"


async def test_idle_queue_is_never_hung() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    clock.time = 1e6
    assert queue.hung(600) is None


async def test_looks_spread_out_where_there_are_very_many() -> None:
    queue = WorkQueue(Clock())
    for number in range(200):
        queue.look_after(("MemoryStore", "ns", str(number)), 10.0)
    assert queue._timers["MemoryStore", "ns", "50"][0] == 10.0
    assert queue._timers["MemoryStore", "ns", "199"][0] == pytest.approx(39.8)
    queue.look_after(A, 0.0)
    assert await queue.get() == A
