"""When the server may get traffic, what it preloads, and what its status says."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale_runtime.config import TierConfig
from inferscale_runtime.server import readiness as module
from inferscale_runtime.server import status as status_module
from inferscale_runtime.server.options import MemoryOptions
from inferscale_runtime.server.readiness import Readiness, blocking_reason
from inferscale_runtime.server.service import MemoryService
from inferscale_runtime.server.status import COUNT_SECONDS, StatusPage
from inferscale_runtime.server.warmup import Preload, recent


def blocked(service: MemoryService) -> str | None:
    return blocking_reason(service.stores.values())


@pytest.mark.parametrize("pinned", [True, False])
def test_a_store_that_is_not_there_blocks_only_when_pinned(
    world: Any, kit: Any, pinned: bool
) -> None:
    pins = {"a": kit.FINGERPRINT} if pinned else {}
    reasons = {}
    reasons["unreadable"] = blocked(world.service("a", pins=pins))
    a = world.store("a")
    reasons["empty"] = blocked(world.service("a", pins=pins))
    kit.add_encoding(a)
    assert blocked(world.service("a", pins=pins)) is None
    assert reasons == {
        "unreadable": "store 'a': store_unreadable" if pinned else None,
        "empty": "store 'a': expected_fingerprint_missing" if pinned else None,
    }


def test_an_encoding_that_does_not_fit_blocks(world: Any, kit: Any) -> None:
    kit.add_encoding(world.store("a"))
    kit.add_encoding(world.store("b"), kit.OTHER)
    assert blocked(world.service("a", "b")) == "store 'b': fingerprint_mismatch"


def test_an_embedder_that_does_not_answer_blocks(world: Any, kit: Any) -> None:
    kit.add_encoding(world.store("a"))
    world.broken_embedders = {"toy"}
    assert blocked(world.service("a")) == "store 'a': embedder 'toy' is broken"


def fill(world: Any, kit: Any, name: str, users: dict[str, int]) -> None:
    """Users with one fact each, last written at the given second."""
    store = world.store(name)
    kit.add_encoding(store)
    for user, second in users.items():
        kit.commit(store, user, [f"{user} has one fact"])
        for path in Path(world.url(name)).glob("users/*/manifest.json"):
            if f'"user":"{user}"' in path.read_text():
                os.utime(path, (second, second))


def test_users_of_all_stores_the_last_written_first(world: Any, kit: Any) -> None:
    fill(world, kit, "a", {"u1": 10, "u3": 30})
    fill(world, kit, "b", {"u2": 20, "u4": 40})
    found = [
        (opened.entry.name, user) for opened, user in recent(world.service("a", "b").adopted())
    ]
    assert found == [("b", "u4"), ("a", "u3"), ("b", "u2"), ("a", "u1")]


def test_preload_keeps_to_its_budget(world: Any, kit: Any) -> None:
    fill(world, kit, "a", {"u1": 10, "u2": 20, "u3": 30})
    service = world.service("a")
    arena = world.arena
    before = arena.used_rows
    rows = len(kit.tokenize("- u1 has one fact\n"))
    preload = Preload(service.adopted(), arena, (before + 2 * rows) * arena.row_bytes)
    preload.run()
    assert preload.users == 2
    assert arena.used_rows == before + 2 * rows
    tiers = {}
    for user in ("u1", "u2", "u3"):
        options = MemoryOptions(user=user)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
        prepared = asyncio.run(service.prepare(options, messages, {}, None))
        tiers[user] = prepared.usage.tier
    assert tiers == {"u3": "dram", "u2": "dram", "u1": "disk"}


def test_preload_can_be_stopped(world: Any, kit: Any) -> None:
    fill(world, kit, "a", {"u1": 10})
    preload = Preload(world.service("a").adopted(), world.arena, 1 << 30)
    preload.stopped = True
    preload.run()
    assert preload.users == 0


def test_the_warm_up_request_meets_nobody(world: Any, kit: Any) -> None:
    fill(world, kit, "a", {"u1": 10})
    service = world.service("a")
    opened = service.adopted()[0]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    user = asyncio.run(service.prepare(MemoryOptions(user="u1"), messages, {}, None))
    first, second = (asyncio.run(service.prepare_warm_up(opened, "u1", 500)) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.usage.mode == "injected"
    assert first.token_ids == user.token_ids
    assert len({user.salt, first.salt, second.salt}) == 3
    assert asyncio.run(service.prepare_warm_up(opened, "nobody", 500)) is None


def test_the_warm_up_request_fits_into_a_short_context(world: Any, kit: Any) -> None:
    store = world.store("a")
    kit.add_encoding(store)
    kit.commit(store, "u1", [f"fact number {n}" for n in range(8)])
    service = world.service("a")
    opened = service.adopted()[0]
    lengths = []
    for max_tokens in (10_000, 150, 90):
        prepared = asyncio.run(service.prepare_warm_up(opened, "u1", max_tokens))
        assert prepared is not None
        assert prepared.token_ids is not None
        assert len(prepared.token_ids) < max_tokens
        lengths.append(prepared.usage.facts)
        service.end(prepared, submitted=False)
    assert lengths[0] == 8
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[2] < lengths[1]
    pinned = world.arena.pinned_rows
    assert asyncio.run(service.prepare_warm_up(opened, "u1", 20)) is None
    assert world.arena.pinned_rows == pinned


class Engine:
    errored = False


def run_readiness(
    service: MemoryService,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[Any],
    until: int,
    tiers: TierConfig | None = None,
) -> list[str | None]:
    """Runs ``keep`` for so many looks; returns the reason after each."""
    seen: list[str | None] = []

    async def request(service: MemoryService, engine: Any) -> bool:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return bool(outcome)

    async def main() -> None:
        readiness = Readiness(service, Engine(), tiers or TierConfig(warm=False))
        seen.append(readiness.reason)
        done = asyncio.Event()

        async def sleep(seconds: float) -> None:
            seen.append(readiness.reason)
            if len(seen) > until:
                done.set()
                await asyncio.Event().wait()

        monkeypatch.setattr(module, "asyncio", SimpleNamespace(
            sleep=sleep, to_thread=asyncio.to_thread, create_task=asyncio.create_task,
            wait=asyncio.wait, Task=asyncio.Task,
        ))  # fmt: skip
        task = asyncio.create_task(readiness.keep())
        waiter = asyncio.create_task(done.wait())
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        seen.append(readiness.reason)
        for each in (task, waiter):
            each.cancel()

    monkeypatch.setattr(module, "warm_up_request", request)
    asyncio.run(main())
    return seen


def test_ready_once_all_is_there(world: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world, kit, "a", {"u1": 10})
    seen = run_readiness(world.service("a"), monkeypatch, [True], 5)
    assert seen == ["starting", None]


def test_a_failed_request_is_tried_again(
    world: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(world, kit, "a", {"u1": 10})
    seen = run_readiness(world.service("a"), monkeypatch, [RuntimeError("secret"), True], 5)
    assert seen == ["starting", "the warm-up request failed: RuntimeError", None]


def test_readiness_stays_while_another_store_is_waited_for(
    world: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(world, kit, "a", {"u1": 10})
    seen = run_readiness(world.service("a", "b"), monkeypatch, [True], 3)
    assert seen == ["starting", None, None, None, None]


def test_the_arena_is_filled_before(world: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world, kit, "a", {"u1": 10})
    service = world.service("a")
    used = world.arena.used_rows
    assert run_readiness(service, monkeypatch, [True], 5, TierConfig()) == ["starting", None]
    assert world.arena.used_rows == used + len(kit.tokenize("- u1 has one fact\n"))


def test_a_dead_engine_is_not_ready(world: Any, kit: Any) -> None:
    engine = Engine()
    readiness = Readiness(world.service("a"), engine, TierConfig())
    engine.errored = True
    assert readiness.reason == "the engine is dead"


def test_status_tells_store_by_store(world: Any, kit: Any) -> None:
    fill(world, kit, "a", {"u1": 10, "u2": 20})
    service = world.service("a", "b", pins={"b": kit.FINGERPRINT})
    now = [100.0]
    page = StatusPage(service, Readiness(service, Engine(), TierConfig()), lambda: now[0])
    body = asyncio.run(page.body())
    assert body.pop("version")
    assert body == {
        "ready": False,
        "ready_reason": "starting",
        "fingerprint": kit.FINGERPRINT,
        "reason": None,
        "stores": [
            {
                "name": "a",
                "fingerprint": kit.FINGERPRINT,
                "expected_fingerprint": None,
                "reason": None,
                "users": 2,
                "facts": 2,
                "pending": 0,
                "embedder": "toy",
                "embedder_problem": None,
            },
            {
                "name": "b",
                "fingerprint": None,
                "expected_fingerprint": kit.FINGERPRINT,
                "reason": "store_unreadable",
                "users": None,
                "facts": None,
                "pending": None,
                "embedder": None,
                "embedder_problem": None,
            },
        ],
    }
    kit.commit(world.store("a"), "u3", ["new"])
    assert asyncio.run(page.body())["stores"][0]["users"] == 2, "counted anew only now and then"
    now[0] += COUNT_SECONDS
    assert asyncio.run(page.body())["stores"][0]["users"] == 3


def test_a_count_that_takes_long_holds_no_answer_up(
    world: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(world, kit, "a", {"u1": 10})
    service = world.service("a")
    now = [100.0]
    page = StatusPage(service, Readiness(service, Engine(), TierConfig()), lambda: now[0])
    monkeypatch.setattr(status_module, "WAIT_SECONDS", 0)
    go_on = threading.Event()
    counts = []

    def count(served: Any) -> tuple[int, int]:
        assert go_on.wait(30)
        counts.append(served.entry.name)
        now[0] += 60
        return status_module._Count(1, 1, 0)

    monkeypatch.setattr(status_module, "_count", count)

    async def main() -> list[Any]:
        seen = [(await page.body())["stores"][0]["users"] for _ in range(2)]
        go_on.set()
        while (await page.body())["stores"][0]["users"] is None:
            await asyncio.sleep(0)
        now[0] += COUNT_SECONDS  # a minute of counting asks for more rest than that
        seen.append((await page.body())["stores"][0]["users"])
        return seen

    assert asyncio.run(main()) == [None, None, 1]
    assert counts == ["a"]
