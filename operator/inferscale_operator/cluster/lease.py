"""A Lease: of several operators one acts.

The rules are those of Kubernetes' own components: a holder renews by an update that fails when
someone else wrote in between; a candidate takes over when it has *seen* no renewal for the lease's
duration on its own clock. Times in the Lease are for people: clocks of different machines are
never compared. (The client library's election compares naive local times and cannot release.)

The holder also checks its own right before every write: a process that was suspended for longer
than the lease finds out before it does harm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from inferscale_operator.cluster.errors import AlreadyExistsError, ClusterError, ConflictError
from inferscale_operator.cluster.transport import NotFoundError, Transport, path_of
from inferscale_operator.desired.kinds import LEASE, Manifest
from inferscale_operator.desired.naming import FIELD_MANAGER, MANAGED_BY

_log = logging.getLogger(__name__)


class LeaseLostError(Exception):
    """This process does not hold the lease any more and must not act."""


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Where the lease is and how long it lasts.

    Attributes:
        namespace: Its namespace.
        name: Its name.
        identity: Name of this process, unlike any other.
        duration_seconds: How long others wait after the last renewal that they saw.
    """

    namespace: str
    name: str
    identity: str
    duration_seconds: float = 15.0

    @property
    def renew_deadline(self) -> float:
        """Seconds without a renewal after which the holder gives up: before others may act."""
        return self.duration_seconds * 2 / 3

    @property
    def retry_seconds(self) -> float:
        """Seconds between two tries."""
        return self.duration_seconds / 7.5


class Lease:
    """The lease as this process sees it.

    Args:
        transport: Requests; its ``may_write`` is not used for the lease itself.
        settings: Place, identity, duration.
        clock: Monotonic seconds.
        now: Time for people, UTC.
        sleep: Waiting.
    """

    def __init__(
        self,
        transport: Transport,
        settings: LeaseSettings,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._transport = transport
        self._settings = settings
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._seen: Any = None
        self._seen_at = 0.0
        self._renewed_at: float | None = None
        self._live: Manifest | None = None

    @property
    def held(self) -> bool:
        """Whether this process may act."""
        return (
            self._renewed_at is not None
            and self._clock() - self._renewed_at < self._settings.duration_seconds
        )

    def check(self) -> None:
        """Raises ``LeaseLostError`` unless this process may act."""
        if not self.held:
            raise LeaseLostError(f"lease {self._settings.name} is not held any more")

    async def acquire(self) -> None:
        """Waits until this process holds the lease."""
        while not await self._try():
            await self._sleep(self._settings.retry_seconds)

    async def keep(self) -> None:
        """Renews for ever; raises ``LeaseLostError`` when that fails for too long."""
        while True:
            await self._sleep(self._settings.retry_seconds)
            if await self._try():
                continue
            since = self._clock() - (self._renewed_at or 0.0)
            if self._renewed_at is None or since >= self._settings.renew_deadline:
                self._renewed_at = None
                raise LeaseLostError(f"lease {self._settings.name} could not be renewed")

    async def release(self) -> None:
        """Lets others act at once; a failure only costs them the lease's duration."""
        if not self.held or self._live is None:
            return
        self._renewed_at = None
        spec = self._live["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1}
        spec["renewTime"] = _micro(self._now())
        try:
            await self._put({**self._live, "spec": spec})
        except ClusterError as error:
            _log.warning("lease not released: %s", error.reason)

    async def _try(self) -> bool:
        started = self._clock()
        try:
            # An answer after the deadline is worth nothing; the next try must still fit in.
            async with asyncio.timeout(self._settings.renew_deadline / 2):
                taken = await self._take_or_renew()
        except NotFoundError as error:
            _log.warning("lease: %s", error)
            return False
        except (ClusterError, TimeoutError) as error:
            _log.debug("lease: %s", error)
            return False
        if taken:
            # The right counts from before the request: others count from when they see it.
            self._renewed_at = started
        return taken

    async def _take_or_renew(self) -> bool:
        settings = self._settings
        path = path_of(LEASE, settings.namespace, settings.name)
        try:
            live = await self._transport.request("GET", path)
        except NotFoundError:
            return await self._create()
        spec = live.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        record = (holder, spec.get("renewTime"), live["metadata"].get("resourceVersion"))
        if record != self._seen:
            self._seen, self._seen_at = record, self._clock()
        mine = holder == settings.identity
        if holder and not mine:
            self._renewed_at = None
            # The holder's own promise counts: it may have been started with other settings.
            promised = float(spec.get("leaseDurationSeconds") or settings.duration_seconds)
            if self._clock() - self._seen_at < promised:
                return False
        now = _micro(self._now())
        wanted = {
            "holderIdentity": settings.identity,
            "leaseDurationSeconds": max(1, round(settings.duration_seconds)),
            "acquireTime": spec.get("acquireTime") or now if mine else now,
            "renewTime": now,
            "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (0 if mine else 1),
        }
        try:
            await self._put({**live, "spec": spec | wanted})
        except ConflictError:
            return False
        return True

    async def _create(self) -> bool:
        settings = self._settings
        now = _micro(self._now())
        body = {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {
                "name": settings.name,
                "namespace": settings.namespace,
                "labels": {MANAGED_BY: FIELD_MANAGER},
            },
            "spec": {
                "holderIdentity": settings.identity,
                "leaseDurationSeconds": max(1, round(settings.duration_seconds)),
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }
        try:
            self._live = await self._transport.request(
                "POST", path_of(LEASE, settings.namespace), body=body
            )
        except AlreadyExistsError:
            return False
        return True

    async def _put(self, body: Manifest) -> None:
        path = path_of(LEASE, self._settings.namespace, self._settings.name)
        self._live = await self._transport.request("PUT", path, body=body)


def _micro(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
