from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from inferscale_operator.cluster.errors import AlreadyExistsError, ConflictError, UnavailableError
from inferscale_operator.cluster.lease import Lease, LeaseLostError, LeaseSettings
from inferscale_operator.cluster.transport import NotFoundError

pytestmark = pytest.mark.asyncio


class Server:
    """One Lease with the API server's rules; ``down`` lets every request fail."""

    def __init__(self) -> None:
        self.live: dict[str, Any] | None = None
        self.version = 0
        self.down = False

    async def request(self, method: str, path: str, *, body: Any = None, **_: Any) -> Any:
        if self.down:
            raise UnavailableError("down")
        if method == "GET":
            if self.live is None:
                raise NotFoundError("no lease")
            return copy.deepcopy(self.live)
        if method == "POST" and self.live is not None:
            raise AlreadyExistsError("there is one")
        if method == "PUT":
            assert self.live is not None
            if body["metadata"]["resourceVersion"] != self.live["metadata"]["resourceVersion"]:
                raise ConflictError("changed")
        self.version += 1
        self.live = copy.deepcopy(body)
        self.live["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.live)

    @property
    def holder(self) -> str:
        assert self.live is not None
        return str(self.live["spec"]["holderIdentity"])


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def make_lease(
    server: Server,
    clock: Clock,
    name: str,
    skew: timedelta = timedelta(),
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Lease:
    settings = LeaseSettings("ns", "lease", name, duration_seconds=15)
    now = datetime(2026, 1, 1, tzinfo=UTC) + skew
    transport: Any = server
    return Lease(transport, settings, clock, lambda: now, sleep)


async def test_first_one_gets_it_second_one_does_not() -> None:
    server, clock = Server(), Clock()
    first, second = make_lease(server, clock, "a"), make_lease(server, clock, "b")
    assert await first._try()
    assert first.held
    assert not await second._try()
    assert not second.held
    assert server.holder == "a"


@pytest.mark.parametrize("skew", [timedelta(), timedelta(hours=-5), timedelta(hours=5)])
async def test_takes_over_only_after_seeing_no_renewal_for_the_duration(skew: timedelta) -> None:
    server, clock = Server(), Clock()
    first, second = make_lease(server, clock, "a"), make_lease(server, clock, "b", skew)
    await first._try()
    assert not await second._try()
    clock.time += 14
    await first._try()
    assert not await second._try()
    clock.time += 14
    assert not await second._try(), "the renewal was seen 14 s ago"
    clock.time += 1
    assert await second._try()
    assert server.holder == "b"
    assert server.live is not None
    assert server.live["spec"]["leaseTransitions"] == 1
    assert not first.held


async def test_holder_that_slept_does_not_act() -> None:
    server, clock = Server(), Clock()
    first = make_lease(server, clock, "a")
    await first._try()
    first.check()
    clock.time += 15
    with pytest.raises(LeaseLostError):
        first.check()


async def test_holder_gives_up_before_others_may_act() -> None:
    server, clock = Server(), Clock()

    async def pass_time(seconds: float) -> None:
        clock.time += seconds

    first = make_lease(server, clock, "a", sleep=pass_time)
    await first._try()
    renewed = clock.time
    server.down = True
    with pytest.raises(LeaseLostError):
        await first.keep()
    assert 10 <= clock.time - renewed < 15


async def test_holder_that_was_replaced_gives_up_at_its_next_look() -> None:
    server, clock = Server(), Clock()

    async def pass_time(seconds: float) -> None:
        clock.time += seconds

    first = make_lease(server, clock, "a", sleep=pass_time)
    await first._try()
    assert server.live is not None
    server.live["spec"]["holderIdentity"] = "b"
    started = clock.time
    with pytest.raises(LeaseLostError):
        await first.keep()
    assert clock.time - started == pytest.approx(2.0)


async def test_short_outage_is_survived() -> None:
    server, clock = Server(), Clock()
    sleeps: list[float] = []

    async def pass_time(seconds: float) -> None:
        clock.time += seconds
        sleeps.append(seconds)
        server.down = len(sleeps) < 3
        if len(sleeps) == 5:
            raise asyncio.CancelledError

    first = make_lease(server, clock, "a", sleep=pass_time)
    await first._try()
    with pytest.raises(asyncio.CancelledError):
        await first.keep()
    assert first.held


async def test_released_lease_is_free_at_once() -> None:
    server, clock = Server(), Clock()
    first, second = make_lease(server, clock, "a"), make_lease(server, clock, "b")
    await first._try()
    await first.release()
    assert server.holder == ""
    assert not first.held
    assert await second._try()


async def test_race_for_a_new_lease_has_one_winner() -> None:
    server, clock = Server(), Clock()
    leases = [make_lease(server, clock, name) for name in "abcd"]
    won = await asyncio.gather(*(lease._try() for lease in leases))
    assert sum(won) == 1


async def test_times_are_in_utc_with_microseconds() -> None:
    server, clock = Server(), Clock()
    await make_lease(server, clock, "a")._try()
    assert server.live is not None
    assert server.live["spec"]["renewTime"] == "2026-01-01T00:00:00.000000Z"
