"""``GET /inferscale/v1/status``: what this server has, store by store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from inferscale_runtime import __version__
from inferscale_runtime.server.readiness import Readiness
from inferscale_runtime.server.service import MemoryService
from inferscale_runtime.server.stores import ServedStore

COUNT_SECONDS = 30.0
"""How old the numbers of users and facts may be: counting reads every manifest (arbitrary)."""


class StatusPage:
    """Builds the body of the status route.

    Args:
        service: Has the stores.
        readiness: Tells whether the server is ready.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        service: MemoryService,
        readiness: Readiness,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._readiness = readiness
        self._clock = clock
        self._counted_at: float | None = None
        self._counts: dict[str, tuple[int, int] | None] = {}
        self._lock = asyncio.Lock()

    async def body(self) -> dict[str, Any]:
        """The figures; those of the first store stand at the top too."""
        async with self._lock:
            now = self._clock()
            if self._counted_at is None or now - self._counted_at >= COUNT_SECONDS:
                self._counts = await asyncio.to_thread(self._count)
                self._counted_at = now
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
        users, facts = self._counts.get(served.entry.name) or (None, None)
        return {
            "name": served.entry.name,
            "fingerprint": (current.identity.fingerprint if current else None) or None,
            "expected_fingerprint": served.entry.expected_fingerprint,
            "reason": served.reason,
            "users": users,
            "facts": facts,
            "embedder": (current.embedder if current else None) or None,
            "embedder_problem": served.embedder_problem,
        }

    def _count(self) -> dict[str, tuple[int, int] | None]:
        return {name: _users_and_facts(served) for name, served in self._service.stores.items()}


def _users_and_facts(served: ServedStore) -> tuple[int, int] | None:
    if served.current is None:
        return None
    users = facts = 0
    try:
        for stats in served.current.store.user_stats():
            users += 1
            facts += stats.facts
    except Exception:
        # The storage may be away; its errors are of many unrelated types.
        return None
    return users, facts
