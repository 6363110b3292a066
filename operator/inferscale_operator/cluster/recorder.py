"""Events on custom resources: posted in the background, repeated ones counted up.

Events are a courtesy: a failure is logged once and costs nothing else; a full queue drops them.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from inferscale_operator.cluster.errors import ClusterError
from inferscale_operator.cluster.transport import (
    MERGE_PATCH,
    NotFoundError,
    Transport,
    path_of,
)
from inferscale_operator.desired.kinds import EVENT, Manifest
from inferscale_operator.desired.naming import FIELD_MANAGER
from inferscale_operator.planner.plan import EventRecord

AGGREGATION = timedelta(hours=1)
_QUEUE_LIMIT = 5000
_REMEMBERED = 5000
_MESSAGE_LIMIT = 1024  # the API server refuses longer ones

_log = logging.getLogger(__name__)

_Key = tuple[str, str, str, str]


@dataclass(slots=True)
class _Posted:
    namespace: str
    name: str
    count: int
    first: datetime


class EventRecorder:
    """Posts Events one after the other.

    Args:
        transport: Requests.
        instance: Name of this process in the Events.
        clock: Time in UTC.
    """

    def __init__(
        self,
        transport: Transport,
        instance: str,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._transport = transport
        self._instance = instance
        self._clock = clock
        self._queue: asyncio.Queue[tuple[Manifest, EventRecord]] = asyncio.Queue(_QUEUE_LIMIT)
        self._posted: OrderedDict[_Key, _Posted] = OrderedDict()
        self._dropping = False

    def record(self, owner: Manifest, event: EventRecord) -> None:
        """Queues an Event; never blocks, never raises."""
        metadata = owner["metadata"]
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion", ""),
        }
        try:
            self._queue.put_nowait((reference, event))
            self._dropping = False
        except asyncio.QueueFull:
            if not self._dropping:
                _log.warning("events are dropped: the queue is full", extra={"action": "event"})
            self._dropping = True

    async def run(self) -> None:
        """Posts what is queued, for ever."""
        while True:
            reference, event = await self._queue.get()
            try:
                await self.post(reference, event)
            except ClusterError as error:
                _log.warning(
                    "event not posted: %s",
                    error.reason,
                    extra={
                        "action": "event",
                        "namespace": reference["namespace"],
                        "object": reference["name"],
                    },
                )
            finally:
                self._queue.task_done()

    async def drain(self) -> None:
        """Waits until everything queued was tried."""
        await self._queue.join()

    async def post(self, reference: Manifest, event: EventRecord) -> None:
        """Posts one Event, or counts the one of the last hour up.

        Raises:
            ClusterError: The API server did not take it.
        """
        key = (reference["uid"], event.type, event.reason, event.message)
        now = self._clock()
        known = self._posted.get(key)
        if known is not None and now - known.first < AGGREGATION:
            try:
                await self._count_up(known, now)
                return
            except NotFoundError:
                pass
        await self._create(key, reference, event, now)

    async def _count_up(self, known: _Posted, now: datetime) -> None:
        await self._transport.request(
            "PATCH",
            path_of(EVENT, known.namespace, known.name),
            body={"count": known.count + 1, "lastTimestamp": _rfc3339(now)},
            content_type=MERGE_PATCH,
        )
        known.count += 1

    async def _create(
        self, key: _Key, reference: Manifest, event: EventRecord, now: datetime
    ) -> None:
        name = f"{reference['name']}.{uuid.uuid4().hex[:16]}"
        stamp = _rfc3339(now)
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": reference["namespace"]},
            "involvedObject": reference,
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:_MESSAGE_LIMIT],
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": self._instance,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        await self._transport.request("POST", path_of(EVENT, reference["namespace"]), body=body)
        self._posted[key] = _Posted(reference["namespace"], name, 1, now)
        self._posted.move_to_end(key)
        while len(self._posted) > _REMEMBERED:
            self._posted.popitem(last=False)


def _rfc3339(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
