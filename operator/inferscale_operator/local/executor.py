"""Runs the Pods of a cluster as local processes: what a kubelet is to a node.

A pod that runs here has the finalizer ``EXECUTOR``: a deleted pod stays, marked, until its
processes have ended. This takes the place of the kubelet's second, immediate DELETE, and works on
every API server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from inferscale_operator.cluster.base import Cluster
from inferscale_operator.cluster.errors import ClusterError, ConflictError, InvalidError
from inferscale_operator.desired.kinds import POD, Manifest
from inferscale_operator.local.containers import Backoff, Timekeeping, timestamp
from inferscale_operator.local.launch import assign_ports
from inferscale_operator.local.pod_runner import LaunchContainer, PodRunner
from inferscale_operator.local.pod_status import failed_status

logger = logging.getLogger(__name__)

EXECUTOR = "inferscale.dev/executor"
"""Finalizer of pods that run here."""


class PodLauncher(Protocol):
    """Starts containers and clears up behind pods; ``launch.Launcher``."""

    @property
    def launch(self) -> LaunchContainer:
        """Starts a container."""

    def forget(self, pod: Manifest) -> None:
        """Removes what a pod leaves."""


class Executor:
    """Keeps local processes as the cluster's Pods say.

    Args:
        cluster: Where Pods are read and their status is written.
        launcher: Starts containers.
        namespace: Only pods of this namespace; None for all.
        backoff: Waiting times between restarts.
        time: Clock and sleep.
        ports: Chooses a port for each named port of a pod.
    """

    def __init__(
        self,
        cluster: Cluster,
        launcher: PodLauncher,
        namespace: str | None = None,
        backoff: Backoff | None = None,
        time: Timekeeping | None = None,
        ports: Callable[[Manifest], dict[str, int]] = assign_ports,
    ) -> None:
        self._cluster = cluster
        self._launcher = launcher
        self._namespace = namespace
        self._backoff = backoff
        self._time = time or Timekeeping()
        self._assign_ports = ports
        self._runners: dict[str, PodRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def adopt(self) -> None:
        """Deals with pods that an earlier executor ran: call it once, before ``sync``.

        Their processes are gone. Pods that may be restarted start again; others have failed, with
        ``DisruptionTarget``.
        """
        for pod in await self._cluster.list(POD, self._namespace):
            ours = EXECUTOR in (pod["metadata"].get("finalizers") or [])
            if not ours or _is_terminal(pod):
                continue
            if pod["spec"].get("restartPolicy", "Always") == "Always":
                await self._try_status(pod, {"phase": "Pending"})
            else:
                await self._try_status(pod, failed_status(pod, timestamp(self._time.clock())))

    async def sync(self) -> None:
        """One look at all pods; starts and stops what is due, and waits for none of it."""
        pods = await self._cluster.list(POD, self._namespace)
        found = {pod["metadata"]["uid"]: pod for pod in pods}
        for uid, pod in found.items():
            try:
                await self._sync_pod(uid, pod)
            except ConflictError:
                continue  # it changed just now: the next look sees it as it is
            except ClusterError as error:
                logger.warning("pod %s: %s", pod["metadata"]["name"], error)
        for uid, runner in list(self._runners.items()):
            if uid in found:
                continue
            runner.stop()
            if self._tasks[uid].done():
                self._drop(uid)

    async def _sync_pod(self, uid: str, pod: Manifest) -> None:
        runner = self._runners.get(uid)
        deleted = bool(pod["metadata"].get("deletionTimestamp"))
        if runner is None:
            if deleted:
                await self._release(pod)
            elif not _is_terminal(pod):
                await self._start(uid, pod)
            return
        if deleted:
            runner.pod = pod
            runner.stop()
        if self._tasks[uid].done():
            if deleted:
                await self._release(pod)
            # Ended for good: nothing of it runs any more, and its status tells the rest.
            del self._runners[uid], self._tasks[uid]

    async def _start(self, uid: str, pod: Manifest) -> None:
        if EXECUTOR not in (pod["metadata"].get("finalizers") or []):
            try:
                pod = await self._cluster.set_finalizer(pod, EXECUTOR, present=True)
            except InvalidError:
                return  # deleted in between
        runner = PodRunner(
            self._cluster,
            pod,
            self._assign_ports(pod),
            self._launcher.launch,
            self._backoff,
            self._time,
        )
        self._runners[uid] = runner
        self._tasks[uid] = asyncio.create_task(self._run(runner), name=pod["metadata"]["name"])

    async def _run(self, runner: PodRunner) -> None:
        try:
            await runner.run()
        except Exception:
            logger.exception("pod %s: the executor failed", runner.pod["metadata"]["name"])

    async def _release(self, pod: Manifest) -> None:
        self._launcher.forget(pod)
        if EXECUTOR in (pod["metadata"].get("finalizers") or []):
            await self._cluster.set_finalizer(pod, EXECUTOR, present=False)

    def _drop(self, uid: str) -> None:
        self._launcher.forget(self._runners.pop(uid).pod)
        del self._tasks[uid]

    async def _try_status(self, pod: Manifest, status: Manifest) -> None:
        try:
            await self._cluster.patch_status(pod, status)
        except ClusterError as error:
            logger.warning("pod %s: status not written: %s", pod["metadata"]["name"], error)

    async def stop(self) -> None:
        """Ends all pods, each within its grace period, without preStop handlers.

        Traffic has ended before; handlers would only make people wait. Pods stay in the cluster:
        those that may be restarted go on with the next executor.
        """
        for runner in self._runners.values():
            runner.stop(disrupted=True, with_pre_stop=False)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def kill(self) -> None:
        """Ends all pods at once; ``stop`` then returns soon."""
        for runner in self._runners.values():
            runner.kill()


def _is_terminal(pod: Manifest) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
