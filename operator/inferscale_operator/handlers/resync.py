"""Lists against the cache, and a fresh look at everything now and then."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from inferscale_operator.cluster.cache import ChildCache, OwnerKey, version_of
from inferscale_operator.cluster.client import ApiCluster
from inferscale_operator.cluster.errors import ClusterError
from inferscale_operator.desired.kinds import CUSTOM_KINDS, Kind
from inferscale_operator.desired.naming import FIELD_MANAGER, MANAGED_BY
from inferscale_operator.handlers.events import Router, key_of
from inferscale_operator.handlers.hearing import Hearing
from inferscale_operator.handlers.work_queue import WorkQueue

GRACE_SECONDS = 10.0
"""How long a watch may be behind a list."""
_LABELS = {MANAGED_BY: FIELD_MANAGER}
Place = tuple[str, str, str]
"""Namespace, name, uid (empty for a custom resource)."""
_log = logging.getLogger(__name__)


class Resync:
    """Comparisons of lists with what was heard.

    Args:
        cluster: Where to list.
        cache: Children.
        router: Custom resources.
        queue: Keys to look at.
        hearing: Told what the watch missed.
        namespaces: Namespaces to list; empty for all.
        sleep: Waiting.
    """

    def __init__(
        self,
        cluster: ApiCluster,
        cache: ChildCache,
        router: Router,
        queue: WorkQueue,
        hearing: Hearing,
        namespaces: Sequence[str],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._router = router
        self._queue = queue
        self._hearing = hearing
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._sleep = sleep

    async def fill(self, kinds: Sequence[Kind]) -> None:
        """Lists everything once, before the first decision.

        Raises:
            ClusterError: A kind could not be listed.
        """
        # Children first: no resource may be planned with its children not yet known.
        for kind in sorted(kinds, key=lambda kind: kind in CUSTOM_KINDS):
            await self._list(kind)

    async def compare(self, kinds: Sequence[Kind]) -> bool:
        """Compares lists of all kinds with the cache and heals; whether a watch missed changes."""
        suspects = await self.heal(kinds)
        if any(suspects.values()):
            await self._sleep(GRACE_SECONDS)
        any_missed = False
        for kind, unheard in suspects.items():
            missed = sum(self._still_unheard(kind, *item) for item in unheard.items())
            if missed:
                any_missed = True
                self._hearing.missed(kind)
                _log.warning(
                    "the watch of %s missed %d changes; they were read from a list",
                    kind.plural,
                    missed,
                    extra={"action": "compare", "kind": kind.kind},
                )
        return any_missed

    async def heal(self, kinds: Sequence[Kind]) -> dict[Kind, dict[Place, int]]:
        """Makes the cache agree with lists of all kinds.

        A watch that begins tells what is there, and not what went between the list before it and
        its own: only a list that is read afterwards shows that.

        Returns:
            Objects of whose present state the watch has not told so far, to their versions.
        """
        suspects: dict[Kind, dict[Place, int]] = {}
        for kind in kinds:
            try:
                suspects[kind] = await self._list(kind)
            except ClusterError as error:
                _log.warning(
                    "%s could not be listed: %s",
                    kind.plural,
                    error.reason,
                    extra={"action": "compare", "kind": kind.kind},
                )
        return suspects

    def look_at_everything(self, spread_seconds: float = 0.0) -> None:
        """Queues every custom resource, spread over some time."""
        for key in self._router.known:
            self._queue.add_after(key, random.random() * spread_seconds)

    async def _list(self, kind: Kind) -> dict[Place, int]:
        unheard: dict[Place, int] = {}
        for namespace in self._namespaces:
            if kind in CUSTOM_KINDS:
                unheard |= await self._list_custom(kind, namespace)
            else:
                unheard |= await self._list_children(kind, namespace)
        return unheard

    async def _list_children(self, kind: Kind, namespace: str | None) -> dict[Place, int]:
        comparison = self._cache.compare(kind, namespace)
        version: int | None = None
        async for page, listed in self._cluster.pages(kind, namespace, _LABELS):
            comparison.page(page)
            version = min(version or int(listed), int(listed))
        found = comparison.finish(version or 0)
        for owner in sorted(found.owners):
            self._queue.add(owner)
        return found.unheard

    async def _list_custom(self, kind: Kind, namespace: str | None) -> dict[Place, int]:
        before = {
            key for key in self._router.known if key[0] == kind.kind and namespace in (None, key[1])
        }
        unheard: dict[Place, int] = {}
        seen: set[OwnerKey] = set()
        async for page, _ in self._cluster.pages(kind, namespace):
            for manifest in page:
                key = key_of(kind, manifest)
                seen.add(key)
                self._router.seen(kind, manifest)
                if self._router.heard_version(key) < version_of(manifest):
                    unheard[key[1], key[2], ""] = version_of(manifest)
        for key in sorted(before - seen):
            # Queued, not dropped: the look at the live object tells whether it is gone.
            self._queue.add(key)
            if await self._cluster.get(kind, key[1], key[2]) is None:
                self._router.removed(key)
        return unheard

    def _still_unheard(self, kind: Kind, place: Place, version: int) -> bool:
        namespace, name, uid = place
        if kind in CUSTOM_KINDS:
            key = (kind.kind, namespace, name)
            return key in self._router.known and self._router.heard_version(key) < version
        heard = self._cache.heard(kind, namespace, name, uid)
        return heard is not None and heard < version
