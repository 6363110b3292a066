"""``GET /inferscale/v1/status``: what this server has, store by store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from inferscale_runtime import __version__
from inferscale_runtime.server.canary import Canary
from inferscale_runtime.server.readiness import Readiness
from inferscale_runtime.server.service import MemoryService
from inferscale_runtime.server.stores import ServedStore

COUNT_SECONDS = 30.0
"""How old the numbers of users and facts may be: counting reads every manifest (arbitrary)."""
COUNT_SHARE = 0.05
"""Most of the time that is spent on counting: in a large store on object storage it takes minutes
and costs a request for each user (arbitrary)."""
WAIT_SECONDS = 1.0
"""How long an answer waits for a count; an older one, or none, is shown then (arbitrary)."""


class _Count(NamedTuple):
    """Users, facts, and facts without KV for this server's model; None is not known."""

    users: int | None
    facts: int | None
    pending: int | None


class StatusPage:
    """Builds the body of the status route.

    Args:
        service: Has the stores.
        readiness: Tells whether the server is ready.
        clock: Seconds, monotonic.
        canary: Knows how far injected answers are from text, or None.
    """

    def __init__(
        self,
        service: MemoryService,
        readiness: Readiness,
        clock: Callable[[], float] = time.monotonic,
        canary: Canary | None = None,
    ) -> None:
        self._canary = canary
        self._service = service
        self._readiness = readiness
        self._clock = clock
        self._next_count = clock()
        self._counts: dict[str, _Count | None] = {}
        self._counting: asyncio.Task[None] | None = None

    async def body(self) -> dict[str, Any]:
        """The figures; those of the first store stand at the top too."""
        if self._counting is None and self._clock() >= self._next_count:
            self._counting = asyncio.create_task(self._count())
        if self._counting is not None:
            await asyncio.wait({self._counting}, timeout=WAIT_SECONDS)
        stores = [self._store(served) for served in self._service.stores.values()]
        reason = self._readiness.reason
        return {
            "version": __version__,
            "ready": reason is None,
            "ready_reason": reason,
            "fingerprint": stores[0]["fingerprint"],
            "reason": stores[0]["reason"],
            "stores": stores,
        }

    def _store(self, served: ServedStore) -> dict[str, Any]:
        current = served.current
        count = self._counts.get(served.entry.name) or _Count(None, None, None)
        return {
            "name": served.entry.name,
            "fingerprint": (current.identity.fingerprint if current else None) or None,
            "expected_fingerprint": served.entry.expected_fingerprint,
            "reason": served.reason,
            "users": count.users,
            "facts": count.facts,
            "pending": count.pending,
            "embedder": (current.embedder if current else None) or None,
            "embedder_problem": served.embedder_problem,
            **({"canary": self._canary.status(served.entry.name)} if self._canary else {}),
        }

    async def _count(self) -> None:
        started = self._clock()
        stores = self._service.stores.items()
        self._counts = await asyncio.to_thread(
            lambda: {name: _count(served) for name, served in stores}
        )
        now = self._clock()
        self._next_count = now + max(COUNT_SECONDS, (now - started) / COUNT_SHARE)
        self._counting = None


def public_part(body: dict[str, Any]) -> dict[str, Any]:
    """What a caller without credentials sees: no more than the metrics, which are open too.

    The operator plans with it, and has no credentials.
    """
    hidden = ("users", "facts", "embedder", "embedder_problem")
    stores = [{k: v for k, v in store.items() if k not in hidden} for store in body["stores"]]
    return {**body, "stores": stores}


def _count(served: ServedStore) -> _Count | None:
    current = served.current
    if current is None:
        return None
    fingerprint = served.entry.expected_fingerprint or current.identity.fingerprint
    users = facts = pending = 0
    try:
        for stats in current.store.user_stats():
            users += 1
            facts += stats.facts
            pending += stats.pending(fingerprint)
    except Exception:
        # The storage may be away; its errors are of many unrelated types.
        return None
    return _Count(users, facts, pending)
