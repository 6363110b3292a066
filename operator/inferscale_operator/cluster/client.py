"""The ``Cluster`` of a real API server."""

from __future__ import annotations

import builtins
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp

from inferscale_operator.cluster.errors import ConflictError, InvalidError
from inferscale_operator.cluster.recorder import EventRecorder
from inferscale_operator.cluster.redact import trimmed
from inferscale_operator.cluster.transport import (
    APPLY,
    JSON_PATCH,
    MERGE_PATCH,
    GoneError,
    NotFoundError,
    Transport,
    path_of,
)
from inferscale_operator.desired.kinds import JOB, Kind, Manifest, kind_of
from inferscale_operator.desired.naming import FIELD_MANAGER
from inferscale_operator.desired.paths import PORTS_ANNOTATION
from inferscale_operator.planner.plan import EventRecord

PAGE_SIZE = 500
DISCOVERY_SECONDS = 300.0
POD_TIMEOUT_SECONDS = 2.0
POD_ANSWER_BYTES = 64 * 1024
POD_TEXT_BYTES = 4 * 1024 * 1024
"""A page of metrics with many histograms is some hundred KiB."""
SCALE_MANAGER = f"{FIELD_MANAGER}-scale"
"""Field manager of the size, so that one sees who wrote it."""
_LIST_STARTS = 5


class ApiCluster:
    """Reads and writes objects of one API server.

    Args:
        transport: Requests.
        recorder: Posts Events; None drops them.
        clock: Monotonic seconds, for the age of what discovery said.
    """

    def __init__(
        self,
        transport: Transport,
        recorder: EventRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._recorder = recorder
        self._clock = clock
        self._served: dict[str, tuple[float, frozenset[str]]] = {}
        self._pods: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes connections to pods; the transport belongs to the caller."""
        if self._pods is not None:
            await self._pods.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Manifest | None:
        """The live object, or None."""
        try:
            found = await self._transport.request("GET", path_of(kind, namespace, name))
        except NotFoundError:
            return None
        return trimmed(kind, found)

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """All objects of a kind, in one namespace or in all, with these labels."""
        return [item async for page, _ in self.pages(kind, namespace, labels) for item in page]

    async def pages(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[builtins.list[Manifest], str]]:
        """Pages of a list, each with the list's resourceVersion.

        A continuation that the server has forgotten (410) starts the list again: objects may then
        come twice, and the resourceVersion moves.
        """
        query = {"limit": str(PAGE_SIZE)}
        if labels:
            query["labelSelector"] = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
        starts = 0
        token = ""
        while True:
            try:
                answer = await self._transport.request(
                    "GET",
                    path_of(kind, namespace),
                    query=query | ({"continue": token} if token else {}),
                )
            except GoneError as error:
                starts += 1
                if starts >= _LIST_STARTS:
                    raise ConflictError(f"list of {kind.plural} was cut off again and again") from (
                        error
                    )
                token = ""
                continue
            except NotFoundError as error:
                raise InvalidError(f"the cluster does not serve {kind.plural}: {error}") from error
            metadata = answer.get("metadata") or {}
            yield (
                [trimmed(kind, item) for item in answer.get("items") or []],
                str(metadata.get("resourceVersion") or "0"),
            )
            token = str(metadata.get("continue") or "")
            if not token:
                return

    async def create(self, manifest: Manifest) -> Manifest:
        """Makes an object; ``AlreadyExistsError`` when there is one."""
        kind = kind_of(manifest)
        return await self._write(
            kind,
            "POST",
            path_of(kind, manifest["metadata"].get("namespace")),
            body=manifest,
            query={"fieldManager": FIELD_MANAGER},
        )

    async def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply with the operator's field manager, forced."""
        kind = kind_of(manifest)
        metadata = manifest["metadata"]
        return await self._write(
            kind,
            "PATCH",
            path_of(kind, metadata.get("namespace"), metadata["name"]),
            body=manifest,
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            content_type=APPLY,
        )

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Deletes, Jobs in the foreground; gone already, or another uid, is no error."""
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Foreground" if kind == JOB else "Background",
            "preconditions": {"uid": uid},
        }
        try:
            await self._transport.request("DELETE", path_of(kind, namespace, name), body=body)
        except (NotFoundError, ConflictError):
            return

    async def patch_status(self, live: Manifest, status: Manifest) -> Manifest:
        """Replaces the status of a custom resource, if it is still ``live``'s version."""
        kind = kind_of(live)
        metadata = live["metadata"]
        return await self._write(
            kind,
            "PATCH",
            path_of(kind, metadata["namespace"], metadata["name"], "status"),
            body=[*_same_version(live), {"op": "add", "path": "/status", "value": status}],
            query={"fieldManager": FIELD_MANAGER},
            content_type=JSON_PATCH,
        )

    async def scale(self, live: Manifest, replicas: int) -> None:
        """Writes the size through the scale subresource, if it is still ``live``'s version."""
        metadata = live["metadata"]
        await self._request_write(
            "PATCH",
            path_of(kind_of(live), metadata["namespace"], metadata["name"], "scale"),
            body=[
                *_same_version(live),
                {"op": "add", "path": "/spec/replicas", "value": replicas},
            ],
            query={"fieldManager": SCALE_MANAGER},
            content_type=JSON_PATCH,
        )

    async def annotate(self, live: Manifest, key: str, value: str) -> None:
        """Sets one annotation of an object, if it has not been made anew."""
        metadata = live["metadata"]
        # A uid that is not the live one is a conflict.
        await self._request_write(
            "PATCH",
            path_of(kind_of(live), metadata["namespace"], metadata["name"]),
            body={"metadata": {"uid": metadata["uid"], "annotations": {key: value}}},
            query={"fieldManager": FIELD_MANAGER},
            content_type=MERGE_PATCH,
        )

    async def set_finalizer(self, live: Manifest, finalizer: str, *, present: bool) -> Manifest:
        """Adds or removes one finalizer, if the object is still ``live``'s version."""
        kind = kind_of(live)
        metadata = live["metadata"]
        before = list(metadata.get("finalizers") or [])
        after = [item for item in before if item != finalizer] + ([finalizer] if present else [])
        if after == before or (present and finalizer in before):
            return live
        return await self._write(
            kind,
            "PATCH",
            path_of(kind, metadata["namespace"], metadata["name"]),
            body=[
                *_same_version(live),
                {"op": "add", "path": "/metadata/finalizers", "value": after},
            ],
            query={"fieldManager": FIELD_MANAGER},
            content_type=JSON_PATCH,
        )

    async def post_event(self, owner: Manifest, event: EventRecord) -> None:
        """Hands an Event to the recorder; posting happens in the background."""
        if self._recorder is not None:
            self._recorder.record(owner, event)

    async def knows(self, kind: Kind) -> bool:
        """Whether the cluster serves a kind, as of at most five minutes ago."""
        cached = self._served.get(kind.api_version)
        if cached is None or self._clock() - cached[0] > DISCOVERY_SECONDS:
            root = f"/apis/{kind.api_version}" if kind.group else f"/api/{kind.api_version}"
            try:
                answer = await self._transport.request("GET", root)
            except NotFoundError:
                answer = {}
            names = frozenset(str(item["name"]) for item in answer.get("resources") or [])
            cached = (self._clock(), names)
            self._served[kind.api_version] = cached
        return kind.plural in cached[1]

    def forget_discovery(self) -> None:
        """The next ``knows`` asks again."""
        self._served.clear()

    async def ask_pod(self, pod: Manifest, port: str, path: str) -> Mapping[str, object] | None:
        """GET of a JSON object from a pod's named port; None when it does not answer in 2 s."""
        text = await self._get_from_pod(pod, port, path, POD_ANSWER_BYTES)
        try:
            value = json.loads(text) if text is not None else None
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    async def read_pod(self, pod: Manifest, port: str, path: str) -> str | None:
        """GET of a text from a pod's named port; None when it does not answer in 2 s."""
        return await self._get_from_pod(pod, port, path, POD_TEXT_BYTES)

    async def _get_from_pod(self, pod: Manifest, port: str, path: str, limit: int) -> str | None:
        address = pod_address(pod, port)
        if address is None:
            return None
        if self._pods is None:
            self._pods = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=POD_TIMEOUT_SECONDS), trust_env=False
            )
        try:
            async with self._pods.get(f"http://{address}{path}", allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                data = await _read_up_to(answer.content, limit)
            return data.decode()
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None

    async def _write(self, kind: Kind, method: str, path: str, **how: Any) -> Manifest:
        return trimmed(kind, await self._request_write(method, path, **how))

    async def _request_write(self, method: str, path: str, **how: Any) -> Any:
        try:
            return await self._transport.request(method, path, **how)
        except NotFoundError as error:
            raise ConflictError(f"it, or its namespace, is gone: {error}") from error


def pod_address(pod: Manifest, port: str) -> str | None:
    """``host:port`` of a pod's named port; None without an address or without such a port."""
    host = str((pod.get("status") or {}).get("podIP") or "")
    if not host:
        return None
    number = _port_of(pod, port)
    if number is None:
        return None
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def _port_of(pod: Manifest, port: str) -> int | None:
    shared = ((pod.get("metadata") or {}).get("annotations") or {}).get(PORTS_ANNOTATION)
    if shared is not None:
        try:
            return int(json.loads(shared)[port])
        except (ValueError, TypeError, KeyError):
            return None
    for container in (pod.get("spec") or {}).get("containers") or []:
        for item in container.get("ports") or []:
            if item.get("name") == port:
                return int(item["containerPort"])
    return None


async def _read_up_to(stream: aiohttp.StreamReader, limit: int) -> bytes:
    data = bytearray()
    async for chunk in stream.iter_chunked(8192):
        data += chunk
        if len(data) > limit:
            raise ValueError("the answer is too long")
    return bytes(data)


def _same_version(live: Manifest) -> list[dict[str, Any]]:
    # The uid too: a resource that was made again under the same name starts with no history.
    metadata = live["metadata"]
    return [
        {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
        {"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]},
    ]
