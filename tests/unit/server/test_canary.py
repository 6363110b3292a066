"""The canary's work around a scripted engine: what is asked, when, and what follows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale_runtime.config import CanaryConfig
from inferscale_runtime.server.canary import Canary
from inferscale_runtime.server.options import MemoryOptions

Answer = Callable[[int], Mapping[int, float]]
"""Probabilities of the next token by the number of tokens that the answer has."""


def certain(token: int) -> dict[int, float]:
    return {token: 0.9, token + 1: 0.1}


class Engine:
    """Answers greedily by two scripts, one for injected prompts and one for text."""

    def __init__(self, injected: Answer, text: Answer, policy: str = "fcfs") -> None:
        self.scripts = {True: injected, False: text}
        self.asked: list[SimpleNamespace] = []
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=4096),
            scheduler_config=SimpleNamespace(policy=policy),
        )
        self.running = self.most_running = 0
        self.least_together = 1  # answers wait until so many have run at once
        self.prompt_length: int | None = None

    async def generate(
        self, prompt: Any, params: Any, name: str, priority: int = 0
    ) -> AsyncIterator[Any]:
        injected = params.extra_args is not None
        ids = prompt["prompt_token_ids"]
        self.asked.append(
            SimpleNamespace(
                injected=injected, ids=ids, salt=prompt["cache_salt"], priority=priority
            )
        )
        if injected:
            self.prompt_length = len(ids)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        async with asyncio.timeout(60):
            while self.most_running < self.least_together:
                await asyncio.sleep(0.001)
        self.running -= 1
        assert self.prompt_length is not None
        had = len(ids) - self.prompt_length
        places = range(had, had + params.max_tokens)
        found = [self.scripts[injected](place) for place in places]
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=[max(p, key=lambda t, p=p: p[t]) for p in found],
                    logprobs=[
                        {t: SimpleNamespace(logprob=math.log(v)) for t, v in p.items()}
                        for p in found
                    ],
                )
            ]
        )


def same(place: int) -> dict[int, float]:
    return certain(10 * place)


def other(place: int) -> dict[int, float]:
    return {10 * place: 0.1, 10 * place + 1: 0.9}


@pytest.fixture
def service(world: Any, kit: Any) -> Any:
    store = world.store("a")
    kit.add_encoding(store)
    kit.commit(store, "u1", ["one fact of mine", "another thing"])
    return world.service("a")


def canary(service: Any, engine: Engine, **fields: Any) -> Canary:
    config = CanaryConfig.model_validate({"tokens": 4, "start_samples": 2, **fields})
    return Canary(service, engine, config, draw=lambda: 0.0)


def ask(service: Any) -> Any:
    messages = [{"role": "user", "content": "one fact"}]
    prepared = asyncio.run(service.prepare(MemoryOptions(user="u1"), messages, {}, None))
    service.end(prepared)
    return prepared


def test_a_good_store_stays_in_use(service: Any) -> None:
    engine = Engine(same, same)
    found = canary(service, engine)
    asyncio.run(found.check_stores())
    assert found.status("a") == {"state": "ok", "kl": 0.0, "top1_agreement": 1.0, "samples": 2}
    assert ask(service).usage.mode == "injected"
    assert [asked.injected for asked in engine.asked] == [True, False] * 2
    assert engine.most_running == 1
    # The same prompt, and nobody's blocks: neither the other side's nor a user's.
    assert engine.asked[0].ids == engine.asked[1].ids
    assert len({asked.salt for asked in engine.asked} | {ask(service).salt}) == 5


def test_before_there_are_users_a_store_s_prompts_go_together(service: Any) -> None:
    engine = Engine(same, same)
    engine.least_together = 2
    found = canary(service, engine)
    asyncio.run(found.check_stores(together=True))
    assert found.status("a") == {"state": "ok", "kl": 0.0, "top1_agreement": 1.0, "samples": 2}


def test_text_follows_the_injected_answer_token_by_token(service: Any) -> None:
    """After each disagreement text goes on behind the injected request's token."""

    def mixed(place: int) -> dict[int, float]:
        return other(place) if place in (1, 2) else same(place)

    engine = Engine(same, mixed)
    found = canary(service, engine, start_samples=1)
    asyncio.run(found.check_stores())
    first = len(engine.asked[0].ids)
    tails = [asked.ids[first:] for asked in engine.asked if not asked.injected]
    assert tails == [[], [0, 10], [0, 10, 20]]
    status = found.status("a")
    assert status["top1_agreement"] == 0.5
    assert status["kl"] == pytest.approx(0.5 * 0.8 * math.log(9), abs=1e-3)


def test_a_bad_store_goes_as_text_until_it_is_good_again(service: Any) -> None:
    engine = Engine(same, other)
    now = [0.0]
    config = CanaryConfig(tokens=4, start_samples=2, recheck_seconds=60)
    found = Canary(service, engine, config, clock=lambda: now[0], draw=lambda: 0.0)
    asyncio.run(found.check_stores())
    assert found.status("a")["state"] == "degraded"
    usage = ask(service).usage
    assert (usage.mode, usage.reason) == ("text", "canary")
    engine.scripts[False] = same
    asyncio.run(found.check_stores())
    assert found.status("a")["state"] == "degraded", "not yet"
    now[0] = 60.0
    asyncio.run(found.check_stores())
    assert found.status("a")["state"] == "ok"
    assert ask(service).usage.mode == "injected"


def test_a_share_of_users_requests_is_scored_one_at_a_time(service: Any) -> None:
    engine = Engine(same, same)
    draws = iter([0.5, 0.09, 0.0])
    config = CanaryConfig(tokens=2, sample=0.1, start_samples=0)
    found = Canary(service, engine, config, draw=lambda: next(draws))
    messages = [{"role": "user", "content": "one fact"}]

    async def run() -> None:
        options = MemoryOptions(user="u1")
        prepared = await service.prepare(options, messages, {}, None)
        service.end(prepared)
        for _ in range(3):  # not drawn, drawn, drawn but one is under way
            found.offer(options, lambda: (messages, {}), prepared)
        while found.status("a")["samples"] < 1:
            await asyncio.sleep(0.001)
        await found.check_stores()

    asyncio.run(run())
    assert len(engine.asked) == 2
    assert found.status("a")["samples"] == 1


def test_what_was_not_injected_is_not_scored(service: Any) -> None:
    found = canary(service, Engine(same, same), sample=1.0)
    messages = [{"role": "user", "content": "one fact"}]
    options = MemoryOptions(user="u1", mode="text")
    prepared = asyncio.run(service.prepare(options, messages, {}, None))
    found.offer(options, lambda: (messages, {}), prepared)  # would need a running loop
    assert found.status("a")["samples"] == 0


def test_users_go_first(service: Any) -> None:
    engine = Engine(same, same, policy="priority")
    found = canary(service, engine, start_samples=1)

    async def run() -> None:
        messages = [{"role": "user", "content": "one fact"}]
        prepared = await service.prepare(MemoryOptions(user="u1"), messages, {}, None)
        task = asyncio.create_task(found.check_stores())
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not engine.asked, "a user's request is open"
        service.end(prepared)
        await task

    asyncio.run(run())
    assert len(engine.asked) == 2
    assert all(asked.priority > 0 for asked in engine.asked)


def test_a_store_without_users_is_looked_at_later(world: Any, kit: Any) -> None:
    kit.add_encoding(world.store("a"))
    engine = Engine(same, same)
    now = [0.0]
    service = world.service("a")
    found = Canary(
        service, engine, CanaryConfig(start_samples=3), clock=lambda: now[0], draw=lambda: 0.0
    )
    asyncio.run(found.check_stores())
    assert found.status("a")["state"] == "unknown"
    kit.commit(world.store("a"), "u1", ["one fact of mine"])
    asyncio.run(found.check_stores())
    assert not engine.asked
    now[0] = 60.0
    asyncio.run(found.check_stores())
    assert found.status("a")["state"] == "ok"


def test_the_start_does_not_wait_for_ever(service: Any) -> None:
    class Stuck(Engine):
        async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield None

    found = canary(service, Stuck(same, same), start_timeout_ms=20)

    async def run() -> None:
        await asyncio.wait_for(found.start(), 30)

    asyncio.run(run())
    assert found.status("a")["state"] == "unknown"
