"""Between reading a request's segments and its lease, other requests read theirs."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from inferscale_runtime.server import staging as staging_module
from inferscale_runtime.server.options import MemoryOptions
from inferscale_runtime.server.service import MemoryService, Prepared
from inferscale_runtime.server.staging import Staging, patience
from inferscale_runtime.tiers.slab import load_shape, map_slab


async def ask(service: MemoryService, user: str) -> Prepared:
    messages = [{"role": "user", "content": "hello"}]
    options = MemoryOptions(user=user, link_tail=0)
    return await service.prepare(options, messages, {"add_generation_prompt": True}, None)


@pytest.fixture
def small(tmp_path: Path, kit: Any) -> Any:
    """An arena that holds the preamble and one user's facts, not two users'."""
    world = kit.World(tmp_path, num_rows=100)
    store = world.store("a")
    kit.add_encoding(store)
    for user in ("ann", "bob"):
        kit.commit(store, user, [f"{user} sings" + "." * 20, f"{user} dives" + "." * 20])
    return world


def test_reading_for_others_does_not_take_what_a_request_waits_with(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = small.service("a")
    preamble = small.arena.used_rows
    ensure = Staging.ensure

    async def busy(self: Staging, user: str, view: Any, segments: Any) -> str | None:
        reason = await ensure(self, user, view, segments)
        # The rest of what a busy server reads before this request goes on.
        for number in range(5):
            small.arena.put(f"other{number}", torch.zeros((40, 2, 2, 1, 4)), store="a")
        return reason

    monkeypatch.setattr(Staging, "ensure", busy)
    prepared = asyncio.run(ask(service, "ann"))
    assert (prepared.usage.mode, prepared.usage.reason) == ("injected", None)
    assert prepared.usage.injected_tokens > preamble + 50
    assert prepared.lease is not None
    small.arena.end(prepared.lease, submitted=False)
    assert small.arena.pinned_rows == preamble, "only the preamble stays for good"


def test_two_at_once_in_an_arena_for_one(small: Any) -> None:
    service = small.service("a")
    preamble = small.arena.used_rows

    async def both() -> list[Prepared]:
        return await asyncio.gather(ask(service, "ann"), ask(service, "bob"))

    for prepared in asyncio.run(both()):
        if prepared.lease is not None:
            small.arena.end(prepared.lease, submitted=False)
    assert small.arena.pinned_rows == preamble
    # Whoever was too late the first time finds room when it is asked again.
    for user in ("ann", "bob"):
        again = asyncio.run(ask(service, user))
        assert (again.usage.mode, again.usage.reason) == ("injected", None)
        assert again.lease is not None
        small.arena.end(again.lease, submitted=False)


def test_a_request_that_waited_too_long_keeps_nothing(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = small.service("a")
    preamble = small.arena.used_rows

    async def late(self: Staging, user: str, view: Any, segments: Any) -> str | None:
        self.read(user, view, list(segments)[:1])
        assert small.arena.pinned_rows > preamble, "kept while it is waited for"
        return "timeout"

    monkeypatch.setattr(Staging, "ensure", late)
    prepared = asyncio.run(ask(service, "ann"))
    assert prepared.usage.reason == "timeout"
    assert prepared.lease is not None
    small.arena.end(prepared.lease, submitted=False)
    assert small.arena.pinned_rows == preamble

    async def cancelled(self: Staging, user: str, view: Any, segments: Any) -> str | None:
        raise asyncio.CancelledError

    monkeypatch.setattr(Staging, "ensure", cancelled)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ask(service, "ann"))
    assert small.arena.pinned_rows == preamble


def test_what_a_store_holds_is_what_the_arena_gets(world: Any, kit: Any) -> None:
    store = world.store("a")
    kit.add_encoding(store)
    kit.commit(store, "ann", ["ann sings", "ann dives"])
    service = world.service("a")
    prepared = asyncio.run(ask(service, "ann"))
    assert prepared.usage.mode == "injected"
    assert prepared.lease is not None
    current = service.stores["a"].current
    view = current.users.get("ann", current.identity.fingerprint)
    segments = list(view.segments.values())
    read = store.read_segments("ann", segments)
    stored = {segment.key: kv for segment, kv in zip(segments, read, strict=True)}
    slab = map_slab(world.folder / "run", load_shape(world.folder / "run"))
    rows = torch.cat([slab[start : start + count] for start, count in prepared.lease.runs])
    preamble = store.read_preamble(kit.FINGERPRINT)[2]
    wanted = [preamble, *(stored[key] for key in prepared.lease.keys[1:])]
    assert torch.equal(rows, torch.cat(wanted))
    world.arena.end(prepared.lease, submitted=False)


@pytest.mark.parametrize("readers", [1, None])
def test_users_are_read_in_the_order_in_which_they_came(
    world: Any, kit: Any, monkeypatch: pytest.MonkeyPatch, readers: int | None
) -> None:
    """Many at once must not all be late together."""
    store = world.store("a")
    kit.add_encoding(store)
    users = [f"u{number:02}" for number in range(20)]
    for user in users:
        kit.commit(store, user, [f"{user} sings"])
    if readers:
        monkeypatch.setattr(staging_module, "_readers", lambda store: readers)
    service = world.service("a")
    begun, ended, most = [], [], []
    read = Staging.read

    def seen(self: Staging, user: str, view: Any, segments: Any) -> str | None:
        begun.append(user)
        most.append(len(begun) - len(ended))
        time.sleep(0.005)  # Lets the others come in between, if they could.
        found = read(self, user, view, segments)
        ended.append(user)
        return found

    monkeypatch.setattr(Staging, "read", seen)

    async def all_of_them() -> list[str]:
        current = service.stores["a"].current
        views = {u: current.users.get(u, current.identity.fingerprint) for u in users}
        ensure = current.staging.ensure
        return await asyncio.gather(
            *(ensure(u, views[u], list(views[u].segments.values())) for u in users)
        )

    assert asyncio.run(all_of_them()) == [None] * 20
    # Two threads that take users in turn may note them the other way round.
    assert begun == users if readers else sorted(begun) == users
    assert max(most) <= (readers or 4)


def test_a_request_waits_in_line_but_not_for_a_store_that_is_silent() -> None:
    began, timeout = 100.0, 2.0
    silent = [patience(began, 50.0, now, timeout) for now in (100.0, 101.5, 102.0)]
    assert silent == [2.0, 0.5, 0.0]
    assert patience(began, 101.5, 102.0, timeout) == 1.5, "somebody else's segment came"
    assert patience(began, 109.9, 109.9, timeout) == pytest.approx(0.1), "five times the timeout"
    assert patience(began, 111.0, 111.0, timeout) < 0
    assert patience(began, 100.0, 100.0, 0.0) == 0, "0 waits for nothing"


@pytest.mark.parametrize("speaks", [True, False])
def test_progress_of_others_keeps_a_request_in_line(
    world: Any, kit: Any, monkeypatch: pytest.MonkeyPatch, speaks: bool
) -> None:
    """The store gives ann's segment when the test lets it, and others' until then or nothing."""
    store = world.store("a")
    kit.add_encoding(store)
    kit.commit(store, "ann", ["ann sings"])
    current = world.service("a").stores["a"].current
    view = current.users.get("ann", current.identity.fingerprint)
    staging = Staging(store, "a", world.arena, 0.05)
    monkeypatch.setattr(staging_module, "LINE_FACTOR", 1000)  # a slow machine counts for nothing
    gate, waited = threading.Event(), []
    read = Staging._stage
    monkeypatch.setattr(Staging, "_stage", lambda *given: (gate.wait(30), read(*given))[1])
    real = asyncio.wait

    async def watched(tasks: Any, timeout: float) -> Any:
        found = await real(tasks, timeout=timeout)
        waited.append(timeout)
        if speaks:
            staging._progress = time.monotonic()
        if len(waited) == 3:
            gate.set()
            found = await real(tasks, timeout=30)
        return found

    monkeypatch.setattr(asyncio, "wait", watched)

    async def ensure() -> str | None:
        try:
            return await staging.ensure("ann", view, list(view.segments.values()))
        finally:
            gate.set()

    assert asyncio.run(ensure()) == (None if speaks else "timeout")
    assert len(waited) == 3 if speaks else len(waited) <= 2
