"""One Pod on this machine: its containers together, and its status in the cluster."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from inferscale_operator.cluster.base import Cluster
from inferscale_operator.cluster.errors import ClusterError, ConflictError
from inferscale_operator.desired.kinds import POD, Manifest
from inferscale_operator.desired.paths import PORTS_ANNOTATION
from inferscale_operator.local.containers import (
    Backoff,
    Container,
    Running,
    Timekeeping,
    timestamp,
)
from inferscale_operator.local.pod_status import pod_status

logger = logging.getLogger(__name__)

LaunchContainer = Callable[[Manifest, Mapping[str, Any], Mapping[str, int]], Awaitable[Running]]

WRITE_RETRY_SECONDS = 1.0


class PodRunner:
    """Runs a pod to its end and keeps its status.

    Args:
        cluster: Where the status goes.
        pod: The live Pod.
        ports: Port of this machine for each named port.
        launch: Starts a container.
        backoff: Waiting times between restarts.
        time: Clock and sleep.
    """

    def __init__(
        self,
        cluster: Cluster,
        pod: Manifest,
        ports: Mapping[str, int],
        launch: LaunchContainer,
        backoff: Backoff | None = None,
        time: Timekeeping | None = None,
    ) -> None:
        self.pod = pod
        self.over = False
        """Whether all containers have ended for good and the status says so."""
        self._cluster = cluster
        self._ports = dict(ports)
        self._time = time or Timekeeping()
        self._changed = asyncio.Event()
        self._reason = ""
        self._disrupted = False
        self._stopping = False
        policy = pod["spec"].get("restartPolicy") or "Always"
        self._containers = {
            spec["name"]: Container(
                spec,
                policy,
                self._launcher(launch, spec),
                self._changed.set,
                backoff,
                self._time,
            )
            for spec in pod["spec"]["containers"]
        }

    @property
    def grace(self) -> float:
        """The pod's grace period in seconds.

        0 counts as not given: generic API servers, which know nothing of Pods, write it for every
        deletion. So a forced deletion is an orderly one here.
        """
        metadata, spec = self.pod["metadata"], self.pod["spec"]
        given = metadata.get("deletionGracePeriodSeconds")
        return float(given or spec.get("terminationGracePeriodSeconds", 30))

    def _launcher(
        self, launch: LaunchContainer, spec: Mapping[str, Any]
    ) -> Callable[[], Awaitable[Running]]:
        return lambda: launch(self.pod, spec, self._ports)

    def stop(self, *, disrupted: bool = False, with_pre_stop: bool = True) -> None:
        """Ends all containers within the grace period.

        Args:
            disrupted: This machine is going, so that the end is not the pod's own failure.
            with_pre_stop: Whether preStop handlers run.
        """
        if self._stopping:
            return
        self._stopping = True
        self._disrupted = disrupted
        for container in self._containers.values():
            container.stop(self.grace, with_pre_stop=with_pre_stop)

    def kill(self) -> None:
        """Ends all containers at once."""
        self._stopping = True
        for container in self._containers.values():
            container.kill()

    async def run(self) -> None:
        """Runs until all containers have ended and the last status is written."""
        await self._announce_ports()
        self._changed.set()
        writer = asyncio.ensure_future(self._write_changes())
        tasks = [asyncio.ensure_future(item.run()) for item in self._containers.values()]
        deadline = asyncio.ensure_future(self._watch_deadline())
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in (*tasks, deadline, writer):
                task.cancel()
            await asyncio.gather(*tasks, deadline, writer, return_exceptions=True)
        await self._write(over=True)
        self.over = True

    async def _watch_deadline(self) -> None:
        seconds = self.pod["spec"].get("activeDeadlineSeconds")
        if seconds is None:
            return
        await self._time.sleep(float(seconds))
        self._reason = "DeadlineExceeded"
        self.stop()

    async def _write_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._write(over=False)

    async def _write(self, *, over: bool) -> None:
        """Writes the status; whoever is slow or refuses is asked again until the pod is gone."""
        while True:
            live = await self._live()
            if live is None:
                return
            status = pod_status(
                live,
                {name: item.state for name, item in self._containers.items()},
                timestamp(self._time.clock()),
                over=over,
                reason=self._reason if over else "",
                disrupted=over and self._disrupted,
            )
            if live.get("status") == status:
                return
            try:
                await self._cluster.patch_status(live, status)
                return
            except ConflictError:
                await asyncio.sleep(0)
            except ClusterError as error:
                logger.warning("pod %s: status not written: %s", live["metadata"]["name"], error)
                await asyncio.sleep(WRITE_RETRY_SECONDS)

    async def _live(self) -> Manifest | None:
        metadata = self.pod["metadata"]
        while True:
            try:
                live = await self._cluster.get(POD, metadata["namespace"], metadata["name"])
            except ClusterError as error:
                logger.warning("pod %s: not read: %s", metadata["name"], error)
                await asyncio.sleep(WRITE_RETRY_SECONDS)
                continue
            return live if live and live["metadata"]["uid"] == metadata["uid"] else None

    async def _announce_ports(self) -> None:
        if not self._ports:
            return
        metadata = self.pod["metadata"]
        # With the uid an apply cannot make a pod again that has just gone.
        note = {
            "apiVersion": POD.api_version,
            "kind": POD.kind,
            "metadata": {
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "annotations": {PORTS_ANNOTATION: json.dumps(self._ports)},
            },
        }
        while True:
            try:
                await self._cluster.apply(note)
                return
            except ConflictError:
                if await self._live() is None:
                    return
            except ClusterError as error:
                logger.warning("pod %s: ports not written: %s", metadata["name"], error)
            await asyncio.sleep(WRITE_RETRY_SECONDS)
