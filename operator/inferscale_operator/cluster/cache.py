"""Live children by owner, kept small.

Fed by watch events, by the operator's own writes and by lists. The newest resourceVersion wins;
what is older than a deletion that was seen does
not come back. Objects are held as compact JSON: as Python objects
the children of a thousand resources would take ten times the memory.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from inferscale_operator.cluster.redact import trimmed
from inferscale_operator.desired.kinds import Kind, Manifest
from inferscale_operator.desired.naming import FIELD_MANAGER, MANAGED_BY, OWNER, OWNER_KIND
from inferscale_operator.planner.plan import ChildKey

OwnerKey = tuple[str, str, str]
"""(kind, namespace, name) of a custom resource."""

_Key = tuple[str, str, str]
_REMEMBERED_DELETIONS = 10_000


@dataclass(slots=True)
class _Entry:
    version: int
    heard: int
    uid: str
    owner: OwnerKey
    data: bytes


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a list showed that the cache did not have.

    Attributes:
        owners: Owners of objects that were added, changed or removed.
        unheard: Objects of whose present state the watch has not told, as (namespace, name, uid)
            to the version that the list had.
    """

    owners: frozenset[OwnerKey]
    unheard: dict[tuple[str, str, str], int]


def owner_of(manifest: Manifest) -> OwnerKey | None:
    """The custom resource whose child this is, by its labels."""
    metadata = manifest["metadata"]
    labels = metadata.get("labels") or {}
    if labels.get(MANAGED_BY) != FIELD_MANAGER or not labels.get(OWNER):
        return None
    return (str(labels.get(OWNER_KIND)), str(metadata.get("namespace", "")), str(labels[OWNER]))


def version_of(manifest: Manifest) -> int:
    """The resourceVersion as a number; 0 when it is none."""
    try:
        return int(manifest["metadata"].get("resourceVersion") or 0)
    except ValueError:
        return 0


class ChildCache:
    """Children of all custom resources."""

    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry] = {}
        self._children: dict[OwnerKey, set[_Key]] = {}
        self._deleted: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def owners(self) -> Iterator[OwnerKey]:
        """Every owner with at least one child."""
        return iter(list(self._children))

    def children(self, owner: OwnerKey) -> dict[ChildKey, Manifest]:
        """Children of a custom resource, decoded."""
        return {
            (key[0], key[2]): json.loads(self._entries[key].data)
            for key in sorted(self._children.get(owner, ()))
        }

    def has(self, kind: Kind, namespace: str, name: str) -> bool:
        """Whether an object is there and carries an owner's labels."""
        return (kind.kind, namespace, name) in self._entries

    def update(self, kind: Kind, manifest: Manifest, *, heard: bool = False) -> OwnerKey | None:
        """Takes an object in, unless it is known in this or a newer version.

        Args:
            kind: Its kind.
            manifest: The live object.
            heard: Whether the watch told of it.

        Returns:
            The owner whose children changed, or None when this was no news.
        """
        metadata = manifest["metadata"]
        key = (kind.kind, str(metadata.get("namespace", "")), str(metadata["name"]))
        uid, version = str(metadata.get("uid", "")), version_of(manifest)
        known = self._entries.get(key)
        if version <= self._deleted.get(uid, -1):
            return None
        if known is not None and known.uid == uid:
            if heard:
                known.heard = max(known.heard, version)
            if version <= known.version:
                return None
        elif known is not None and version < known.version:
            return None
        owner = owner_of(manifest)
        if owner is None:
            # The labels were taken away: to the owner this is the same as a deletion.
            return self._drop(key) if known is not None else None
        same = known is not None and known.uid == uid
        before = known.heard if known is not None and same else 0
        if known is not None and known.owner != owner:
            self._drop(key)
        self._entries[key] = _Entry(
            version, version if heard else before, uid, owner, _packed(kind, manifest)
        )
        self._children.setdefault(owner, set()).add(key)
        return owner

    def remove(
        self, kind: Kind, namespace: str, name: str, uid: str, version: int = 0
    ) -> OwnerKey | None:
        """Takes an object out that was seen to be gone.

        Args:
            kind: Its kind.
            namespace: Its namespace.
            name: Its name.
            uid: Its uid: another object of the same name stays.
            version: resourceVersion at which it was gone. A newer one of the same uid may come: a
                watch also calls an object deleted that has lost the label it is selected by.

        Returns:
            The owner whose children changed, or None when it was not there.
        """
        self._deleted[uid] = max(version, self._deleted.get(uid, -1))
        while len(self._deleted) > _REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)
        key = (kind.kind, namespace, name)
        known = self._entries.get(key)
        if known is None or known.uid != uid or known.version > version > 0:
            return None
        self._deleted[uid] = max(self._deleted[uid], known.version)
        return self._drop(key)

    def compare(self, kind: Kind, namespace: str | None) -> ListComparison:
        """Begins to make the cache agree with a complete list of one kind.

        Args:
            kind: Kind of the list.
            namespace: Namespace of the list, None for all.
        """
        return ListComparison(self, kind, namespace)

    def heard(self, kind: Kind, namespace: str, name: str, uid: str) -> int | None:
        """Newest version of an object that the watch told of; None when it is not there."""
        entry = self._entries.get((kind.kind, namespace, name))
        return entry.heard if entry is not None and entry.uid == uid else None

    def versions(self, kind: Kind, namespace: str | None) -> dict[tuple[str, str], tuple[int, str]]:
        """(namespace, name) of the objects of one kind, to version and uid."""
        return {
            (key[1], key[2]): (entry.version, entry.uid)
            for key, entry in self._entries.items()
            if key[0] == kind.kind and namespace in (None, key[1])
        }

    def _drop(self, key: _Key) -> OwnerKey:
        entry = self._entries.pop(key)
        siblings = self._children[entry.owner]
        siblings.discard(key)
        if not siblings:
            del self._children[entry.owner]
        return entry.owner


class ListComparison:
    """One list, page by page, against the cache.

    Args:
        cache: The cache.
        kind: Kind of the list.
        namespace: Its namespace, None for all.
    """

    def __init__(self, cache: ChildCache, kind: Kind, namespace: str | None) -> None:
        self._cache = cache
        self._kind = kind
        self._namespace = namespace
        self._seen: set[tuple[str, str]] = set()
        self._owners: set[OwnerKey] = set()
        self._unheard: dict[tuple[str, str, str], int] = {}

    def page(self, objects: Iterable[Manifest]) -> None:
        """Takes one page of the list in."""
        for manifest in objects:
            metadata = manifest["metadata"]
            namespace, name = str(metadata.get("namespace", "")), str(metadata["name"])
            self._seen.add((namespace, name))
            owner = self._cache.update(self._kind, manifest)
            if owner is not None:
                self._owners.add(owner)
            uid, version = str(metadata.get("uid", "")), version_of(manifest)
            heard = self._cache.heard(self._kind, namespace, name, uid)
            if heard is not None and heard < version:
                self._unheard[namespace, name, uid] = version

    def finish(self, list_version: int) -> Comparison:
        """Takes out what the list did not have.

        Args:
            list_version: resourceVersion of the list: what is newer than that may miss in it.
        """
        live = self._cache.versions(self._kind, self._namespace)
        for (namespace, name), (version, uid) in live.items():
            if (namespace, name) in self._seen or version > list_version:
                continue
            owner = self._cache.remove(self._kind, namespace, name, uid, list_version)
            if owner is not None:
                self._owners.add(owner)
        return Comparison(frozenset(self._owners), self._unheard)


def _packed(kind: Kind, manifest: Manifest) -> bytes:
    return json.dumps(trimmed(kind, manifest), separators=(",", ":"), ensure_ascii=False).encode()
