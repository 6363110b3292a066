from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from inferscale_operator.cluster.errors import UnavailableError
from inferscale_operator.cluster.recorder import EventRecorder
from inferscale_operator.cluster.transport import NotFoundError
from inferscale_operator.planner.plan import EventRecord

pytestmark = pytest.mark.asyncio
REFERENCE = {"kind": "MemoryStore", "namespace": "ns", "name": "m", "uid": "u"}
EVENT = EventRecord("Normal", "Encoded", "2 of 2")


class Server:
    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.error: Exception | None = None

    async def request(self, method: str, path: str, *, body: Any = None, **_: Any) -> Any:
        if self.error is not None and method == "PATCH":
            raise self.error
        self.requests.append((method, path, body))
        return {}


class Clock:
    def __init__(self) -> None:
        self.time = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.time


def make(server: Server, clock: Clock) -> EventRecorder:
    transport: Any = server
    return EventRecorder(transport, "me", clock)


async def test_repeated_event_is_counted_up_within_the_hour() -> None:
    server, clock = Server(), Clock()
    recorder = make(server, clock)
    await recorder.post(REFERENCE, EVENT)
    clock.time += timedelta(minutes=59)
    await recorder.post(REFERENCE, EVENT)
    await recorder.post(REFERENCE, EVENT)
    assert [method for method, _, _ in server.requests] == ["POST", "PATCH", "PATCH"]
    assert server.requests[-1][2]["count"] == 3
    clock.time += timedelta(minutes=1)
    await recorder.post(REFERENCE, EVENT)
    assert server.requests[-1][0] == "POST"


async def test_other_message_or_resource_is_another_event() -> None:
    server, clock = Server(), Clock()
    recorder = make(server, clock)
    await recorder.post(REFERENCE, EVENT)
    await recorder.post(REFERENCE, EventRecord("Normal", "Encoded", "3 of 3"))
    await recorder.post(REFERENCE | {"uid": "v"}, EVENT)
    assert [method for method, _, _ in server.requests] == ["POST"] * 3


async def test_event_that_expired_in_the_cluster_is_made_again() -> None:
    server, clock = Server(), Clock()
    recorder = make(server, clock)
    await recorder.post(REFERENCE, EVENT)
    server.error = NotFoundError("expired")
    await recorder.post(REFERENCE, EVENT)
    assert [method for method, _, _ in server.requests] == ["POST", "POST"]


async def test_failure_is_raised_to_the_loop_and_long_messages_are_cut() -> None:
    server, clock = Server(), Clock()
    recorder = make(server, clock)
    await recorder.post(REFERENCE, EventRecord("Normal", "Long", "x" * 5000))
    assert len(server.requests[0][2]["message"]) == 1024
    server.error = UnavailableError("down")
    with pytest.raises(UnavailableError):
        await recorder.post(REFERENCE, EventRecord("Normal", "Long", "x" * 5000))


async def test_full_queue_drops_instead_of_blocking() -> None:
    recorder = make(Server(), Clock())
    owner = {"apiVersion": "v", "kind": "MemoryStore", "metadata": REFERENCE}
    for number in range(6000):
        recorder.record(owner, EventRecord("Normal", "R", str(number)))
    assert recorder._queue.qsize() == 5000
