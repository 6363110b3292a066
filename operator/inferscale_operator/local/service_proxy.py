"""A loopback port per Service: TCP to a ready pod (I/O).

New connections go to ready pods only, in turn; established ones stay where they are, so that a
stopping server can finish its answers. Where no pod is ready the client gets HTTP 503, because the
Services here speak HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Sequence

from inferscale_operator.cluster.base import Cluster
from inferscale_operator.cluster.errors import ClusterError
from inferscale_operator.desired.kinds import POD, SERVICE, Manifest
from inferscale_operator.desired.paths import PORTS_ANNOTATION
from inferscale_operator.desired.selection import ACTIVATOR
from inferscale_operator.local.pod_status import is_ready

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 2.0
"""How long a connection waits for the cluster to name the ready pods."""
_CHUNK = 1 << 16
_BODY = b'{"error": {"message": "no pod of this service is ready", "type": "unavailable"}}\n'
_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
    b"Connection: close\r\nContent-Length: " + str(len(_BODY)).encode() + b"\r\n\r\n" + _BODY
)


def pod_port(pod: Manifest, target: str | int) -> int | None:
    """The port of this machine for a target port of a pod, by name or number."""
    text = (pod["metadata"].get("annotations") or {}).get(PORTS_ANNOTATION)
    ports: dict[str, int] = json.loads(text) if text else {}
    for container in pod["spec"]["containers"]:
        for item in container.get("ports") or []:
            if target in (item.get("name"), item["containerPort"]):
                return ports.get(item.get("name", ""))
    return None


def backends(service: Manifest, pods: Sequence[Manifest]) -> list[int]:
    """Ports of the ready pods of a Service, in order of the pods' names."""
    selector = service["spec"].get("selector") or {}
    target = service["spec"]["ports"][0].get("targetPort", service["spec"]["ports"][0]["port"])
    found = []
    for pod in sorted(pods, key=lambda item: str(item["metadata"]["name"])):
        labels = pod["metadata"].get("labels") or {}
        chosen = selector and all(labels.get(key) == value for key, value in selector.items())
        if chosen and is_ready(pod):
            port = pod_port(pod, target)
            if port is not None:
                found.append(port)
    return found


def selects_activator(service: Manifest) -> bool:
    """Whether a Service leads to the activator of its model."""
    selector = service["spec"].get("selector") or {}
    return bool(selector.get("app.kubernetes.io/component") == ACTIVATOR)


class ServiceProxy:
    """The port of one Service.

    Args:
        cluster: Services and pods.
        namespace: Of the Service.
        name: Of the Service.
        activator: Port of the model's activator, where that is no pod.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        activator: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._activator = activator
        self._turn = itertools.count()
        self._last: list[int] = []
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, port: int) -> int:
        """Listens.

        Args:
            port: Port of loopback; 0 for a free one.

        Returns:
            The port.

        Raises:
            OSError: The port is taken.
        """
        self._server = await asyncio.start_server(self._accept, LOOPBACK, port)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        """Takes no new connections; established ones go on until ``abort``."""
        if self._server is not None:
            self._server.close()

    async def abort(self) -> None:
        """Ends established connections."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except OSError as error:
            logger.info("service %s: a connection ended: %r", self._name, error)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await self._connect()
        if upstream is None:
            # The request is read first: closing with unread bytes would reset the connection and
            # take the answer away from the client.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await reader.read(_CHUNK)
            writer.write(_UNAVAILABLE)
            await writer.drain()
            return
        pod_reader, pod_writer = upstream
        requests = asyncio.ensure_future(_pump(reader, pod_writer))
        try:
            # The pod's side decides: when it has said all, the connection is over.
            await _pump(pod_reader, writer)
        finally:
            requests.cancel()
            await asyncio.gather(requests, return_exceptions=True)
            pod_writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        ports = await self._backends()
        first = next(self._turn)
        for offset in range(len(ports)):
            port = ports[(first + offset) % len(ports)]
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(LOOPBACK, port)
        return None

    async def _backends(self) -> list[int]:
        """Ports of ready pods; those known last while the cluster does not answer."""
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                service = await self._cluster.get(SERVICE, self._namespace, self._name)
                pods = await self._cluster.list(POD, self._namespace) if service else []
        except (ClusterError, TimeoutError) as error:
            logger.warning("service %s: the cluster does not answer: %r", self._name, error)
            return self._last
        self._last = backends(service, pods) if service else []
        port = self._activator()
        if service and port is not None and selects_activator(service):
            self._last = [port]
        return self._last


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
