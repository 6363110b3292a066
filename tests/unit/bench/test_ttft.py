"""Order and rows of the TTFT benchmark, with a client that invents times."""

from __future__ import annotations

import asyncio

from inferscale_runtime.bench.client import Answer, Ask
from inferscale_runtime.bench.ttft import growth_note, measure, warm_up
from inferscale_runtime.bench.workload import synthetic_workload


class Client:
    """Text takes 100 ms a fact, injection 10 ms and the floor 8 ms, whatever k is."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []

    async def ask(self, ask: Ask, *, check: bool = True) -> Answer:
        seconds = {"text": 0.1 * ask.k, "injected": 0.008 if ask in self.asked else 0.01}
        self.asked.append(ask)
        return Answer(seconds[ask.mode], 1.0, 30 * ask.k, {"mode": ask.mode})


def test_rows() -> None:
    client = Client()
    work = synthetic_workload(seed=0, users=2, facts=4, questions=4)
    rows = asyncio.run(measure(client, work, [2, 4], repeats=4))  # type: ignore[arg-type]
    assert [row["k"] for row in rows] == [2, 4]
    assert (
        rows[1]
        | {
            "text_p50_ms": 400.0,
            "injected_p50_ms": 10.0,
            "floor_p95_ms": 8.0,
            "text_per_injected": 40.0,
            "injected_per_floor": 1.25,
            "injected_minus_floor_p50_ms": 2.0,
            "prompt_tokens": 120,
            "repeats": 4,
        }
        == rows[1]
    )
    assert growth_note(rows) == "growth from k=2 to k=4: text +100 %, injected +0 %, floor +0 %"


def test_each_question_is_asked_once_as_text_and_twice_injected() -> None:
    client = Client()
    work = synthetic_workload(seed=0, users=2, facts=4, questions=4)
    asyncio.run(measure(client, work, [2, 4], repeats=4))  # type: ignore[arg-type]
    injected = [ask for ask in client.asked if ask.mode == "injected"]
    text = [ask for ask in client.asked if ask.mode == "text"]
    assert len(set(text)) == len(text) == 8
    assert len(set(injected)) * 2 == len(injected)
    # The second one follows at once, while its blocks are still in the cache.
    places = [n for n, ask in enumerate(client.asked) if ask.mode == "injected"]
    assert all(client.asked[a] == client.asked[a + 1] for a in places[::2])
    assert len({(ask.user, ask.question) for ask in client.asked}) == 8
    order = [ask.mode for ask in client.asked[:6]]
    assert order == ["injected", "injected", "text", "text", "injected", "injected"]


def test_warm_up_touches_every_user_with_the_largest_k() -> None:
    client = Client()
    work = synthetic_workload(seed=0, users=3, facts=4, questions=1)
    asyncio.run(warm_up(client, work, [2, 4]))  # type: ignore[arg-type]
    assert {ask.user for ask in client.asked if ask.k == 4} == set(work.users)
