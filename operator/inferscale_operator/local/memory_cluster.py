"""The ``Cluster`` of ``inferscale up`` and of planner tests: objects in memory.

It does what the operator relies on in an API server: resourceVersion and conflicts, generation,
finalizers, background garbage collection by owner references, status apart from the rest, apply by
field ownership, selectors and change notifications. It validates nothing and defaults nothing.

Deterministic: the clock and the source of uids are passed in. One thread, one event loop.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from inferscale_operator.cluster.errors import AlreadyExistsError, ConflictError, InvalidError
from inferscale_operator.desired.kinds import JOB, NAMESPACE, Kind, Manifest
from inferscale_operator.desired.naming import FIELD_MANAGER
from inferscale_operator.local import field_ownership
from inferscale_operator.local.object_keys import (
    Key,
    check_precondition,
    has_labels,
    key_of,
    kind_key,
    words,
)
from inferscale_operator.planner.plan import EventRecord

Manifests = list[Manifest]
Keys = list[Key]

Ask = Callable[[Manifest, str, str], Awaitable[Mapping[str, object] | None]]
Read = Callable[[Manifest, str, str], Awaitable[str | None]]

MAX_EVENTS = 1000

FOREGROUND = "foregroundDeletion"


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one object, as a watch tells it."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Manifest


@dataclass(frozen=True, slots=True)
class PostedEvent:
    """An Event with the object it is about."""

    kind: str
    namespace: str
    name: str
    event: EventRecord


@dataclass(slots=True)
class _Entry:
    live: Manifest
    applied: dict[str, Manifest] = field(default_factory=dict)


def _now() -> datetime:
    return datetime.now(UTC)


async def _no_answer(_pod: Manifest, _port: str, _path: str) -> None:
    return None


class MemoryCluster:
    """Objects in memory, with the behaviour of an API server.

    Args:
        clock: Time for timestamps, UTC.
        uids: Source of unique names.
        ask: How to reach a pod's port; by default no pod answers.
        read: The same for texts.
        optional_kinds: Names of the optional kinds that are known; the others are not.
    """

    def __init__(
        self,
        clock: Callable[[], datetime] = _now,
        uids: Callable[[], str] | None = None,
        ask: Ask = _no_answer,
        read: Read = _no_answer,
        optional_kinds: Iterable[str] = (),
    ) -> None:
        self._clock = clock
        self._uids = uids or (lambda: str(uuid.uuid4()))
        self._ask = ask
        self._read = read
        self._optional_kinds = frozenset(optional_kinds)
        self._entries: dict[Key, _Entry] = {}
        self._version = 0
        self._watchers: list[Callable[[Change], None]] = []
        self.events: list[PostedEvent] = []
        """Posted Events, the newest last; at most ``MAX_EVENTS``."""

    # --- the Cluster protocol -------------------------------------------------------------------

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Manifest | None:
        """The object, or None. Every namespace exists."""
        entry = self._entries.get(kind_key(kind, namespace, name))
        if entry is None and kind == NAMESPACE:
            return {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": name},
                "status": {"phase": "Active"},
            }
        return copy.deepcopy(entry.live) if entry else None

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """Objects of a kind in order of namespace and name."""
        return [
            copy.deepcopy(entry.live)
            for key, entry in sorted(self._entries.items())
            if key[:2] == (kind.group, kind.kind)
            and (namespace is None or key[2] == namespace)
            and has_labels(entry.live, labels)
        ]

    async def create(self, manifest: Manifest) -> Manifest:
        """Makes an object; ``AlreadyExistsError`` when there is one."""
        key = key_of(manifest)
        if key in self._entries:
            raise AlreadyExistsError(f"{words(key)} exists already")
        return self._insert(key, manifest, {})

    async def apply(self, manifest: Manifest, manager: str = FIELD_MANAGER) -> Manifest:
        """Applies a manifest.

        Args:
            manifest: What the manager wants. A ``metadata.uid`` or ``metadata.resourceVersion`` in
                it must be that of the live object.
            manager: Who wants it.
        """
        key = key_of(manifest)
        entry = self._entries.get(key)
        check_precondition(key, manifest, entry.live if entry else None)
        owned = field_ownership.owned_part(manifest)
        if entry is None:
            return self._insert(key, owned, {manager: owned})
        desired = field_ownership.merge(entry.live, entry.applied.get(manager, {}), owned)
        entry.applied[manager] = owned
        return self._store(key, desired)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Deletes an object, or marks it while it has finalizers, or a Job while it has pods."""
        key = kind_key(kind, namespace, name)
        entry = self._entries.get(key)
        if entry is None or entry.live["metadata"]["uid"] != uid:
            return
        dependents = self._dependents(uid) if kind == JOB else []
        if dependents:
            finalizers = entry.live["metadata"].setdefault("finalizers", [])
            if FOREGROUND not in finalizers:
                finalizers.append(FOREGROUND)
        self._delete(key)
        for dependent in dependents:
            if dependent in self._entries:
                self._delete(dependent)

    async def patch_status(self, live: Manifest, status: Manifest) -> Manifest:
        """Replaces the status of any object, if it is still ``live``'s version."""
        key = self._checked(live)
        return self._store(key, {**self._entries[key].live, "status": copy.deepcopy(status)})

    async def scale(self, live: Manifest, replicas: int) -> None:
        """Writes ``spec.serving.replicas``, the field behind the scale subresource."""
        key = self._checked(live)
        spec = self._entries[key].live["spec"]
        serving = {**(spec.get("serving") or {}), "replicas": replicas}
        self._store(key, {**self._entries[key].live, "spec": {**spec, "serving": serving}})

    async def annotate(self, live: Manifest, key: str, value: str) -> None:
        """Sets one annotation of an object, if it has not been made anew."""
        place = key_of(live)
        entry = self._entries.get(place)
        if entry is None or entry.live["metadata"]["uid"] != live["metadata"]["uid"]:
            raise ConflictError(f"{words(place)} is gone")
        changed = copy.deepcopy(entry.live)
        changed["metadata"].setdefault("annotations", {})[key] = value
        self._store(place, changed)

    async def set_finalizer(self, live: Manifest, finalizer: str, *, present: bool) -> Manifest:
        """Adds or removes a finalizer; the last one of a deleted object lets it go."""
        key = self._checked(live)
        changed = copy.deepcopy(self._entries[key].live)
        metadata = changed["metadata"]
        finalizers = [name for name in metadata.get("finalizers", []) if name != finalizer]
        if present:
            if metadata.get("deletionTimestamp"):
                raise InvalidError(f"{words(key)} is being deleted: no finalizer can be added")
            finalizers.append(finalizer)
        metadata.pop("finalizers", None)
        if finalizers:
            metadata["finalizers"] = finalizers
        stored = self._store(key, changed)
        if not finalizers and metadata.get("deletionTimestamp"):
            self._remove(key)
        return stored

    async def post_event(self, owner: Manifest, event: EventRecord) -> None:
        """Keeps an Event in ``events``."""
        metadata = owner["metadata"]
        self.events.append(
            PostedEvent(owner["kind"], metadata.get("namespace", ""), metadata["name"], event)
        )
        del self.events[:-MAX_EVENTS]

    async def knows(self, kind: Kind) -> bool:
        """All kinds that are not optional, and the optional ones that were named."""
        return not kind.optional or kind.kind in self._optional_kinds

    async def read_pod(self, pod: Manifest, port: str, path: str) -> str | None:
        """GET of a text from a pod."""
        return await self._read(pod, port, path)

    async def ask_pod(self, pod: Manifest, port: str, path: str) -> Mapping[str, object] | None:
        """GET of a JSON object from a pod."""
        return await self._ask(pod, port, path)

    # --- watching and persistence ---------------------------------------------------------------

    def watch(self, listener: Callable[[Change], None]) -> Callable[[], None]:
        """Calls ``listener`` on every change, at once and in order.

        Returns:
            A function that ends the watch.
        """
        self._watchers.append(listener)
        return lambda: self._watchers.remove(listener)

    def subscribe(self) -> asyncio.Queue[Change]:
        """A queue that gets every change from now on."""
        queue: asyncio.Queue[Change] = asyncio.Queue()
        self.watch(queue.put_nowait)
        return queue

    def dump(self) -> dict[str, Any]:
        """All objects, for a file."""
        items = [
            {"live": entry.live, "applied": entry.applied}
            for _, entry in sorted(self._entries.items())
        ]
        return {"version": self._version, "items": copy.deepcopy(items)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``dump`` returned; nobody is notified."""
        self._version = int(state["version"])
        self._entries = {
            key_of(item["live"]): _Entry(copy.deepcopy(item["live"]), dict(item["applied"]))
            for item in state["items"]
        }

    async def applied_by(self, manager: str) -> Manifests:
        """Live objects that a manager has applied."""
        return [
            copy.deepcopy(entry.live)
            for _, entry in sorted(self._entries.items())
            if manager in entry.applied
        ]

    # --- internals ------------------------------------------------------------------------------

    def _insert(self, key: Key, manifest: Manifest, applied: dict[str, Manifest]) -> Manifest:
        live = copy.deepcopy(manifest)
        live.pop("status", None)
        metadata = live["metadata"]
        for name in field_ownership.SYSTEM_METADATA:
            metadata.pop(name, None)
        metadata["uid"] = self._uids()
        metadata["creationTimestamp"] = self._timestamp()
        if "spec" in live:
            metadata["generation"] = 1
        self._entries[key] = _Entry(live, copy.deepcopy(applied))
        self._touch(live)
        stored = copy.deepcopy(live)
        self._notify("ADDED", live)
        if metadata.get("ownerReferences") and not self._has_owner(live):
            self._delete(key)
        return stored

    def _store(self, key: Key, changed: Manifest) -> Manifest:
        entry = self._entries[key]
        live = entry.live
        metadata = dict(changed["metadata"])
        for name in field_ownership.SYSTEM_METADATA:
            metadata.pop(name, None)
            if name in live["metadata"]:
                metadata[name] = live["metadata"][name]
        changed = {**changed, "metadata": metadata}
        if changed == live:
            return copy.deepcopy(live)
        if changed.get("spec") != live.get("spec"):
            metadata["generation"] = metadata.get("generation", 0) + 1
        entry.live = changed
        self._touch(changed)
        self._notify("MODIFIED", changed)
        return copy.deepcopy(changed)

    def _delete(self, key: Key) -> None:
        metadata = self._entries[key].live["metadata"]
        if not metadata.get("finalizers"):
            self._remove(key)
        elif not metadata.get("deletionTimestamp"):
            metadata["deletionTimestamp"] = self._timestamp()
            if "generation" in metadata:
                metadata["generation"] += 1
            self._touch(self._entries[key].live)
            self._notify("MODIFIED", self._entries[key].live)

    def _remove(self, key: Key) -> None:
        live = self._entries.pop(key).live
        self._touch(live)
        self._notify("DELETED", live)
        uid = live["metadata"]["uid"]
        for other, entry in sorted(self._entries.items()):
            owners = entry.live["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == uid for owner in owners) and not self._has_owner(entry.live):
                if other in self._entries:
                    self._delete(other)
        self._end_foreground(live)

    def _dependents(self, uid: str) -> Keys:
        return [
            key
            for key, entry in sorted(self._entries.items())
            if any(
                owner["uid"] == uid for owner in entry.live["metadata"].get("ownerReferences") or []
            )
        ]

    def _end_foreground(self, gone: Manifest) -> None:
        """Lets an owner go whose last dependent is gone."""
        for reference in gone["metadata"].get("ownerReferences") or []:
            for key, entry in list(self._entries.items()):
                metadata = entry.live["metadata"]
                waits = FOREGROUND in (metadata.get("finalizers") or [])
                if metadata["uid"] == reference["uid"] and waits:
                    if not self._dependents(metadata["uid"]):
                        metadata["finalizers"].remove(FOREGROUND)
                        if not metadata["finalizers"]:
                            self._remove(key)

    def _has_owner(self, live: Manifest) -> bool:
        uids = {entry.live["metadata"]["uid"] for entry in self._entries.values()}
        return any(owner["uid"] in uids for owner in live["metadata"]["ownerReferences"])

    def _checked(self, live: Manifest) -> Key:
        key = key_of(live)
        entry = self._entries.get(key)
        if entry is None:
            raise ConflictError(f"{words(key)} is gone")
        check_precondition(key, live, entry.live)
        return key

    def _touch(self, live: Manifest) -> None:
        self._version += 1
        live["metadata"]["resourceVersion"] = str(self._version)

    def _timestamp(self) -> str:
        return self._clock().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _notify(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], live: Manifest) -> None:
        for watcher in list(self._watchers):
            watcher(Change(kind, copy.deepcopy(live)))


def counted_uids() -> Callable[[], str]:
    """A source of uids that gives the same ones every time: for tests."""
    numbers = itertools.count(1)
    return lambda: f"00000000-0000-4000-8000-{next(numbers):012d}"


__all__ = ["Change", "Key", "MemoryCluster", "PostedEvent", "counted_uids", "has_labels", "key_of"]
