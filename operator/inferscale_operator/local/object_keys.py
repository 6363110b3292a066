"""How objects of the cluster in memory are told apart; pure."""

from __future__ import annotations

from collections.abc import Mapping

from inferscale_operator.cluster.errors import ConflictError
from inferscale_operator.desired.kinds import Kind, Manifest

Key = tuple[str, str, str, str]
"""(group, kind, namespace, name) of an object; the namespace is empty for cluster-wide kinds."""


def key_of(manifest: Manifest) -> Key:
    """The key of an object."""
    metadata = manifest["metadata"]
    group, _, _ = str(manifest["apiVersion"]).rpartition("/")
    return (group, manifest["kind"], metadata.get("namespace") or "", metadata["name"])


def has_labels(manifest: Manifest, labels: Mapping[str, str] | None) -> bool:
    """Whether an object has all these labels."""
    own = manifest["metadata"].get("labels") or {}
    return all(own.get(name) == value for name, value in (labels or {}).items())


def kind_key(kind: Kind, namespace: str | None, name: str) -> Key:
    """The key of an object of a kind."""
    return (kind.group, kind.kind, namespace or "" if kind.namespaced else "", name)


def words(key: Key) -> str:
    """An object as messages name it."""
    return f"{key[1]} {key[2]}/{key[3]}" if key[2] else f"{key[1]} {key[3]}"


def check_precondition(key: Key, manifest: Manifest, live: Manifest | None) -> None:
    """Raises ``ConflictError`` when uid or resourceVersion of a manifest are not the live ones."""
    for name in ("uid", "resourceVersion"):
        wanted = manifest["metadata"].get(name)
        if wanted is None:
            continue
        if live is None:
            raise ConflictError(f"{words(key)} with {name} {wanted} does not exist")
        found = live["metadata"][name]
        if wanted != found:
            raise ConflictError(f"{words(key)} has {name} {found} now, not {wanted}")
