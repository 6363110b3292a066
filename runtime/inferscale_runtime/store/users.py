"""Reading one version of a user."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.store import tables
from inferscale_runtime.store.manifest import FileRef, Manifest, user_folder
from inferscale_runtime.store.records import Fact, Segment, Tombstone, Turn, UserMemory
from inferscale_runtime.store.snapshot import Snapshots

_LOG = logging.getLogger(__name__)
# A reader that meets so many commits in a row gives up; each try reads few small tables.
_TRIES = 10

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Version:
    """One version as it is stored.

    Attributes:
        manifest: The manifest.
        parts: For each table of facts its facts and embeddings.
        turns: The turns.
        encodings: Fingerprint -> fact id -> segment, without damaged indexes.
        tombstones: What sources must not bring back.
    """

    manifest: Manifest
    parts: list[tuple[FileRef, tuple[Fact, ...], Rows]]
    turns: tuple[Turn, ...]
    encodings: dict[str, dict[str, Segment]]
    tombstones: frozenset[Tombstone] = field(default=frozenset())

    @property
    def facts(self) -> tuple[Fact, ...]:
        """All facts in order."""
        return tuple(fact for _, facts, _ in self.parts for fact in facts)

    def memory(self) -> UserMemory:
        """The version as users of the store see it."""
        full = [rows for _, facts, rows in self.parts if facts] or [self.parts[0][2]]
        manifest = self.manifest
        return UserMemory(
            manifest.user,
            manifest.version,
            self.facts,
            self.turns,
            manifest.embedder,
            np.concatenate(full),
            self.encodings,
            manifest.epoch,
            self.tombstones,
        )


def read_version(snapshots: Snapshots, folder: str) -> Version | None:
    """Returns the newest version in a folder, None when there is none.

    A damaged index costs that fingerprint's segments only; it is logged.

    Raises:
        DamagedStoreError: If the manifest, the facts, the turns or the tombstones are damaged.
    """
    for left in reversed(range(_TRIES)):
        found = snapshots.manifest(folder)
        if found is None:
            return None
        # A commit removes the files of the version before, so a missing file may mean that the
        # manifest in hand is old.
        try:
            return _read(snapshots, folder, found[0], strict=left > 0)
        except DamagedStoreError:
            now = snapshots.manifest(folder)
            if left and now is not None and now[1] == found[1]:
                return _read(snapshots, folder, found[0], strict=False)
            if not left:
                raise
    raise AssertionError("unreachable")


def read_user(snapshots: Snapshots, user: str) -> UserMemory | None:
    """Returns a user's newest version, None for an unknown user; raises as ``read_version``."""
    version = read_version(snapshots, user_folder(user))
    return version.memory() if version else None


def _read(snapshots: Snapshots, folder: str, manifest: Manifest, strict: bool) -> Version:
    parts = []
    for ref in manifest.facts:
        facts, embeddings = snapshots.table(folder, ref, tables.facts_from_bytes)
        parts.append((ref, facts, embeddings))
    turns = snapshots.table(folder, manifest.turns, tables.turns_from_bytes)
    stones: frozenset[Tombstone] = frozenset()
    if manifest.tombstones:
        stones = snapshots.table(folder, manifest.tombstones, tables.tombstones_from_bytes)
    encodings: dict[str, dict[str, Segment]] = {}
    for fingerprint, ref in manifest.encodings.items():
        try:
            encodings[fingerprint] = snapshots.table(folder, ref, tables.index_from_bytes)
        except DamagedStoreError as exc:
            if strict:
                raise
            _LOG.warning("%s", exc)
    return Version(manifest, parts, turns, encodings, stones)
