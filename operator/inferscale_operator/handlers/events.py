"""What a watch event means: which custom resources have to be looked at."""

from __future__ import annotations

from inferscale_operator.cluster.cache import ChildCache, OwnerKey, version_of
from inferscale_operator.desired.kinds import (
    CUSTOM_KINDS,
    MEMORY_STORE,
    PERSONALIZED_MODEL,
    Kind,
    Manifest,
)
from inferscale_operator.handlers.hearing import Hearing
from inferscale_operator.handlers.work_queue import WorkQueue
from inferscale_operator.planner.canary import canary_states
from inferscale_operator.planner.references import store_names
from inferscale_operator.planner.tiers import live_tiers

DELETED = "DELETED"


class Router:
    """Takes events in and queues keys.

    Args:
        cache: Children.
        queue: Keys to look at.
        hearing: Told that the watch of a kind lives.
    """

    def __init__(self, cache: ChildCache, queue: WorkQueue, hearing: Hearing) -> None:
        self._cache = cache
        self._queue = queue
        self._hearing = hearing
        self._versions: dict[OwnerKey, int] = {}
        self._heard: dict[OwnerKey, int] = {}
        self._models_of_store: dict[tuple[str, str], set[OwnerKey]] = {}
        self._stores_of_model: dict[OwnerKey, tuple[str, ...]] = {}
        self._shown_of_model: dict[OwnerKey, dict[tuple[str, str], str]] = {}

    @property
    def known(self) -> list[OwnerKey]:
        """Custom resources that exist, as far as was heard or listed."""
        return list(self._versions)

    def heard_version(self, key: OwnerKey) -> int:
        """Newest version of a custom resource that the watch told of; 0 for none."""
        return self._heard.get(key, 0)

    def models_of(self, store: OwnerKey) -> list[str]:
        """Names of the PersonalizedModels that use a MemoryStore."""
        return sorted(key[2] for key in self._models_of_store.get((store[1], store[2]), ()))

    def event(self, kind: Kind, change: str, manifest: Manifest) -> None:
        """One event.

        Args:
            kind: Kind of the object.
            change: ``ADDED``, ``MODIFIED``, ``DELETED``, or empty for the list that a watch
                begins with.
            manifest: The object.
        """
        if change:
            self._hearing.heard(kind)
        if kind in CUSTOM_KINDS:
            key = key_of(kind, manifest)
            if change == DELETED:
                self.removed(key)
            else:
                self._heard[key] = max(self._heard.get(key, 0), version_of(manifest))
                self.seen(kind, manifest)
            return
        metadata = manifest["metadata"]
        if change == DELETED:
            owner = self._cache.remove(
                kind,
                metadata.get("namespace", ""),
                metadata["name"],
                metadata.get("uid", ""),
                version_of(manifest),
            )
        else:
            owner = self._cache.update(kind, manifest, heard=True)
        if owner is not None:
            self._queue.add(owner)

    def seen(self, kind: Kind, manifest: Manifest) -> bool:
        """A custom resource in some version, from the watch or a list; whether that was news."""
        key, version = key_of(kind, manifest), version_of(manifest)
        if version <= self._versions.get(key, -1):
            return False
        self._versions[key] = version
        self._link(kind, key, manifest)
        self._queue.add(key)
        self._queue_models(key)
        self._queue_stores(key, _shown(manifest))
        return True

    def wrote(self, manifest: Manifest) -> None:
        """A version that this operator wrote itself: no news for the resource, but for others."""
        key = (str(manifest["kind"]), *_place(manifest))
        version = version_of(manifest)
        if version <= self._versions.get(key, -1) or _gone(manifest):
            return
        if key in self._versions:
            self._versions[key] = version
        self._queue_models(key)
        self._queue_stores(key, _shown(manifest))

    def removed(self, key: OwnerKey) -> None:
        """A custom resource is gone."""
        self._versions.pop(key, None)
        self._heard.pop(key, None)
        self._unlink(key)
        self._queue.add(key)
        self._queue_models(key)
        self._queue_stores(key, {})

    def _queue_models(self, key: OwnerKey) -> None:
        if key[0] == MEMORY_STORE.kind:
            for model in sorted(self._models_of_store.get((key[1], key[2]), ())):
                self._queue.add(model)

    def _queue_stores(self, key: OwnerKey, shown: dict[tuple[str, str], str]) -> None:
        """A model's stores show what it says of them, so they are looked at when that changes."""
        if key[0] != PERSONALIZED_MODEL.kind:
            return
        before = self._shown_of_model.pop(key, {})
        if shown:
            self._shown_of_model[key] = shown
        for (_, name), _ in sorted(before.items() ^ shown.items()):
            self._queue.add((MEMORY_STORE.kind, key[1], name))

    def _link(self, kind: Kind, key: OwnerKey, manifest: Manifest) -> None:
        if kind != PERSONALIZED_MODEL:
            return
        names = tuple(store_names(manifest))
        if names == self._stores_of_model.get(key):
            return
        self._unlink(key)
        self._stores_of_model[key] = names
        for name in names:
            self._models_of_store.setdefault((key[1], name), set()).add(key)

    def _unlink(self, key: OwnerKey) -> None:
        for name in self._stores_of_model.pop(key, ()):
            models = self._models_of_store.get((key[1], name), set())
            models.discard(key)
            if not models:
                self._models_of_store.pop((key[1], name), None)


def key_of(kind: Kind, manifest: Manifest) -> OwnerKey:
    """The work queue's key of a custom resource."""
    return (kind.kind, *_place(manifest))


def _shown(model: Manifest) -> dict[tuple[str, str], str]:
    """What a model's stores show of it: the tier, and how far injected answers are from text."""
    tiers, canaries = live_tiers(model), canary_states(model)
    return {("tier", name): tier for name, tier in tiers.items()} | {
        ("canary", name): state for name, state in canaries.items()
    }


def _place(manifest: Manifest) -> tuple[str, str]:
    metadata = manifest["metadata"]
    return (str(metadata.get("namespace", "")), str(metadata["name"]))


def _gone(manifest: Manifest) -> bool:
    metadata = manifest["metadata"]
    return bool(metadata.get("deletionTimestamp")) and not metadata.get("finalizers")
