"""The operator that acts: everything from the first list to the last worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence

from kubernetes.aio.client.configuration import Configuration

from inferscale_operator.cluster.cache import ChildCache
from inferscale_operator.cluster.client import ApiCluster
from inferscale_operator.cluster.errors import UnavailableError
from inferscale_operator.desired.kinds import CUSTOM_KINDS, Kind
from inferscale_operator.handlers.events import Router
from inferscale_operator.handlers.hearing import Hearing
from inferscale_operator.handlers.reconciler import PlanFunction, Reconciler
from inferscale_operator.handlers.resync import Resync
from inferscale_operator.handlers.watching import WATCHED_KINDS, Watcher, WatchSettings
from inferscale_operator.handlers.work_queue import WorkQueue
from inferscale_operator.health import Health
from inferscale_operator.metrics import OperatorMetrics
from inferscale_operator.planner.plan import Defaults
from inferscale_operator.settings import Settings

RETRY_SECONDS = 5.0
WORK_END_SECONDS = 10.0
FIRST_COMPARE_SECONDS = 2.0
_log = logging.getLogger(__name__)


class Acting:
    """One term of acting.

    Args:
        settings: The process's settings.
        configuration: How to reach the API server, for the watches.
        cluster: Reads and writes.
        plans: The decision for each kind, by its name.
        metrics: Figures.
        health: What the probes answer from.
    """

    def __init__(
        self,
        settings: Settings,
        configuration: Configuration,
        cluster: ApiCluster,
        plans: Mapping[str, PlanFunction],
        metrics: OperatorMetrics,
        health: Health,
    ) -> None:
        self._settings = settings
        self._configuration = configuration
        self._cluster = cluster
        self._health = health
        self._cache = ChildCache()
        self._queue = WorkQueue()
        self._hearing = Hearing()
        self._router = Router(self._cache, self._queue, self._hearing)
        self._resync = Resync(
            cluster, self._cache, self._router, self._queue, self._hearing, settings.namespaces
        )
        defaults = Defaults(
            runtime_image=settings.runtime_image,
            operator_namespace=settings.operator_namespace,
            erase_timeout_seconds=settings.erase_timeout_seconds,
            router_image=settings.router_image,
            metrics_namespaces=settings.metrics_namespaces,
            monitor_labels=settings.label_pairs,
            activator_image=settings.activator_image,
        )
        self._reconciler = Reconciler(
            cluster,
            self._cache,
            self._queue,
            plans,
            defaults,
            metrics,
            self._router.wrote,
            models_of=self._router.models_of,
        )
        metrics.follow(self._queue, self._cache)
        health.live += [self._hearing.deaf, lambda: self._queue.hung(settings.hung_seconds)]
        health.before_metrics.append(lambda: metrics.read_hearing(self._hearing))

    async def run(self) -> None:
        """Acts until cancelled; then lets the passes under way end.

        Raises:
            ClusterError: The API server refuses what the operator needs.
        """
        kinds = await self._ready_kinds()
        self._health.not_ready = ""
        workers = [
            asyncio.create_task(self._reconciler.work(), name=f"worker-{number}")
            for number in range(self._settings.workers)
        ]
        others = [
            asyncio.create_task(self._watch(kinds), name="watching"),
            asyncio.create_task(self._look_again(), name="resync"),
        ]
        try:
            done, _ = await asyncio.wait([*workers, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._health.not_ready = "stopping"
            await _end(others)
            await self._let_end(workers)

    async def _let_end(self, workers: Sequence[asyncio.Task[None]]) -> None:
        self._queue.close()
        await asyncio.wait(workers, timeout=WORK_END_SECONDS)
        await _end(workers)

    async def _ready_kinds(self) -> list[Kind]:
        """Waits for the definitions of the custom kinds; lists everything once."""
        while True:
            try:
                self._cluster.forget_discovery()
                missing = [
                    kind.kind for kind in CUSTOM_KINDS if not await self._cluster.knows(kind)
                ]
                if not missing:
                    kinds = await self._served()
                    await self._resync.fill(kinds)
                    return kinds
                problem = (
                    f"the cluster does not know {' and '.join(missing)}: "
                    "install the custom resource definitions (kubectl apply -f crds/)"
                )
            except UnavailableError as error:
                problem = str(error)
            if self._health.not_ready != problem:
                self._health.not_ready = problem
                _log.warning("waiting: %s", problem)
            await asyncio.sleep(RETRY_SECONDS)

    async def _served(self) -> list[Kind]:
        return [kind for kind in WATCHED_KINDS if await self._cluster.knows(kind)]

    async def _watch(self, kinds: list[Kind]) -> None:
        """Watches; starts the watches anew when they miss changes or when kinds come and go."""
        while True:
            watcher = Watcher(
                self._configuration,
                WatchSettings(self._settings.namespaces, kinds),
                self._router.event,
            )
            watcher.start()
            ended = asyncio.create_task(watcher.wait())
            check = asyncio.create_task(self._compare_until_anew(kinds))
            try:
                await asyncio.wait([ended, check], return_when=asyncio.FIRST_COMPLETED)
                if ended.done() and ended.exception() is not None:
                    _log.warning("watching ended: %s", type(ended.exception()).__name__)
                    await asyncio.sleep(1)
                if check.done():
                    check.result()
            finally:
                await _end([ended, check])
                await watcher.stop()
            kinds = await self._served_or(kinds)

    async def _compare_until_anew(self, kinds: list[Kind]) -> None:
        early = early_pauses(self._settings.compare_seconds)
        while True:
            pause = next(early, None)
            await asyncio.sleep(self._settings.compare_seconds if pause is None else pause)
            if pause is not None:
                await self._resync.heal(kinds)
            elif await self._resync.compare(kinds):
                _log.warning("watching is started anew")
                return
            if await self._served_or(kinds) != kinds:
                _log.info("kinds of the cluster changed; watching is started anew")
                return

    async def _served_or(self, kinds: list[Kind]) -> list[Kind]:
        try:
            return await self._served()
        except UnavailableError:
            return kinds

    async def _look_again(self) -> None:
        seconds = self._settings.resync_seconds
        while True:
            await asyncio.sleep(seconds)
            self._resync.look_at_everything(min(60.0, seconds / 10))


def early_pauses(longest: float) -> Iterator[float]:
    """Pauses between the comparisons while new watches begin, each twice the one before.

    What was deleted while a watch began is found after about as long as its beginning took. A
    watch that begins slowly is not deaf, so nothing is judged by these comparisons.

    Args:
        longest: Seconds between two comparisons later on.
    """
    seconds = FIRST_COMPARE_SECONDS
    while seconds < longest:
        yield seconds
        seconds *= 2


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
