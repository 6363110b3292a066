"""One pass over one custom resource: observe, plan, carry out, say when to look again.

No exception leaves ``reconcile``: a failure is counted, logged without object contents, shown in
the resource's condition where a person has to act, and tried again with backoff.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from inferscale_operator.cluster.base import Cluster
from inferscale_operator.cluster.cache import ChildCache, OwnerKey
from inferscale_operator.cluster.errors import (
    ClusterError,
    ConflictError,
    InvalidError,
    OwnedByOtherError,
    UnavailableError,
)
from inferscale_operator.cluster.lease import LeaseLostError
from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.handlers.execute import Executor
from inferscale_operator.handlers.figures import Figures, HeldRequests
from inferscale_operator.handlers.observe import kind_named, observe
from inferscale_operator.handlers.work_queue import WorkQueue
from inferscale_operator.planner.plan import Defaults, EventRecord, Observed, Plan

PlanFunction = Callable[[Manifest, Observed, Defaults], Plan]

_MESSAGE_LIMIT = 1024
_QUICK_REPEATS = 5
_log = logging.getLogger(__name__)


class Reports(Protocol):
    """Where figures go."""

    def reconciled(self, key: OwnerKey, result: str, seconds: float) -> None:
        """One pass ended."""

    def failed(self, key: OwnerKey, reason: str) -> None:
        """One pass failed."""

    def conditions(self, key: OwnerKey, conditions: Mapping[str, str]) -> None:
        """Type to status of a resource's conditions."""

    def gone(self, key: OwnerKey) -> None:
        """A resource is not there any more."""


@dataclass(frozen=True, slots=True)
class _Pass:
    result: str
    again_seconds: float | None = None


class Reconciler:
    """Brings custom resources to what they ask for.

    Args:
        cluster: Reads and writes.
        cache: Children.
        queue: Where keys are put back.
        plans: The decision for each kind, by its name.
        defaults: How the operator was installed.
        reports: Figures.
        on_own_write: Told of each version of a custom resource that this operator wrote.
        now: Time, UTC.
        models_of: Names of the PersonalizedModels that use a MemoryStore.
        held: What waits at activators of this process; without it their pods are asked.
    """

    def __init__(
        self,
        cluster: Cluster,
        cache: ChildCache,
        queue: WorkQueue,
        plans: Mapping[str, PlanFunction],
        defaults: Defaults,
        reports: Reports,
        on_own_write: Callable[[Manifest], None] = lambda _: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        models_of: Callable[[OwnerKey], Iterable[str]] = lambda _: (),
        held: HeldRequests | None = None,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._queue = queue
        self._plans = plans
        self._defaults = defaults
        self._reports = reports
        self._on_own_write = on_own_write
        self._now = now
        self._models_of = models_of
        self._figures = Figures(cluster, held=held)
        self._repeats: dict[OwnerKey, int] = {}

    async def work(self) -> None:
        """Takes keys from the queue until it is closed."""
        while (key := await self._queue.get()) is not None:
            try:
                await self.reconcile(key)
            finally:
                self._queue.done(key)

    async def reconcile(self, key: OwnerKey) -> str:
        """One pass; the result as it is counted.

        Raises:
            LeaseLostError: Another operator acts; this process has to end.
        """
        started = time.monotonic()
        try:
            done = await self._pass(key)
        except LeaseLostError:
            raise
        except ClusterError as error:
            self._failed(key, error)
            done = _Pass("conflict" if isinstance(error, ConflictError) else "error")
        except Exception as error:
            self._broken(key, error)
            done = _Pass("error")
        else:
            self._queue.succeeded(key)
            if done.again_seconds is not None:
                self._queue.look_after(key, done.again_seconds)
        self._reports.reconciled(key, done.result, time.monotonic() - started)
        return done.result

    async def _pass(self, key: OwnerKey) -> _Pass:
        kind, namespace, name = key
        resource = await self._cluster.get(kind_named(kind), namespace, name)
        if resource is None:
            self._queue.forget(key)
            self._repeats.pop(key, None)
            self._reports.gone(key)
            return _Pass("gone")
        self._tell_conditions(key, resource)
        observed = await observe(
            self._cluster,
            self._cache,
            resource,
            self._now(),
            self._figures,
            self._models_of(key),
        )
        plan = self._plans[kind](resource, observed, self._defaults)
        executor = Executor(self._cluster, self._cache, resource, observed, self._on_own_write)
        try:
            outcome = await executor.execute(plan)
        except (InvalidError, OwnedByOtherError) as error:
            await self._show(executor, plan, error)
            self._tell_conditions(key, executor.outcome.resource)
            raise
        self._tell_conditions(key, outcome.resource)
        if not outcome.children_changed:
            self._repeats.pop(key, None)
            result = "changed" if outcome.status_changed else "unchanged"
            return _Pass(result, plan.requeue_seconds)
        return _Pass("changed", self._again(key, plan.requeue_seconds))

    def _again(self, key: OwnerKey, asked: float | None) -> float:
        """After a write the next pass sees its effect, so it comes at once.

        Where every pass writes again (two controllers disagree about a field), it comes later
        and later, so that the quarrel costs little.
        """
        count = self._repeats.get(key, 0) + 1
        self._repeats[key] = count
        if count <= _QUICK_REPEATS:
            return 0.0
        delay = min(2.0 ** (count - _QUICK_REPEATS), 300.0)
        return delay if asked is None else min(delay, max(asked, 1.0))

    async def _show(self, executor: Executor, plan: Plan, error: ClusterError) -> None:
        """Puts what a person has to do into the condition ``Ready``."""
        live = executor.outcome.resource
        base = plan.status if plan.status is not None else live.get("status") or {}
        message = str(error)[:_MESSAGE_LIMIT]
        status, news = failed_status(live, base, error.reason, message, self._now())
        try:
            await executor.write_status(status)
        except ClusterError as second:
            _log.debug("status not written: %s", second.reason)
            return
        if news:
            event = EventRecord("Warning", error.reason, message)
            await self._cluster.post_event(executor.outcome.resource, event)

    def _failed(self, key: OwnerKey, error: ClusterError) -> None:
        wait = error.retry_after if isinstance(error, UnavailableError) else None
        seconds = self._queue.retry(key, wait)
        self._reports.failed(key, error.reason)
        level = logging.DEBUG if isinstance(error, ConflictError) else logging.WARNING
        kind, namespace, name = key
        _log.log(
            level,
            "%s %s/%s: %s; again in %.1f s",
            kind,
            namespace,
            name,
            error,
            seconds,
            extra={"action": "failed", "kind": kind, "namespace": namespace, "object": name},
        )

    def _broken(self, key: OwnerKey, error: Exception) -> None:
        """A fault of the operator itself: where it happened, without values."""
        seconds = self._queue.retry(key)
        self._reports.failed(key, type(error).__name__)
        kind, namespace, name = key
        where = "; ".join(
            f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-6:]
        )
        _log.error(
            "%s %s/%s: %s at %s; again in %.1f s",
            kind,
            namespace,
            name,
            type(error).__name__,
            where,
            seconds,
            extra={"action": "broken", "kind": kind, "namespace": namespace, "object": name},
        )

    def _tell_conditions(self, key: OwnerKey, resource: Manifest) -> None:
        conditions = (resource.get("status") or {}).get("conditions") or []
        self._reports.conditions(
            key, {str(item["type"]): str(item["status"]) for item in conditions}
        )


def failed_status(
    live: Manifest, base: Manifest, reason: str, message: str, now: datetime
) -> tuple[Manifest, bool]:
    """A status whose ``Ready`` says why nothing goes on, and whether that is news.

    Args:
        live: The live custom resource.
        base: The status to take everything else from.
        reason: CamelCase word.
        message: What is wrong and what to do.
        now: Time of a transition.
    """
    generation = live["metadata"].get("generation", 0)
    shown = {item["type"]: item for item in (live.get("status") or {}).get("conditions") or []}.get(
        "Ready", {}
    )
    since = shown.get("lastTransitionTime") if shown.get("status") == "False" else None
    ready = {
        "type": "Ready",
        "status": "False",
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": since or now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    conditions = [item for item in base.get("conditions") or [] if item["type"] != "Ready"]
    status = {**base, "observedGeneration": generation, "conditions": [*conditions, ready]}
    news = (shown.get("reason"), shown.get("message")) != (reason, message)
    return status, news
