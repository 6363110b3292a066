"""Manifests and tables that were read last, so that a small change costs a small read.

A manifest is read from disk each time and parsed only when its bytes are new; tables are found by
their digest. What the newest manifest of a user no longer names is dropped when it is read.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.store.files import StoreFiles
from inferscale_runtime.store.manifest import MANIFEST, FileRef, Manifest, unseal, user_folder
from inferscale_runtime.store.reader import read_table

CACHE_BYTES = 64 << 20
"""Most bytes of files whose content is kept (arbitrary: about 40 users of 1,000 facts)."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _Kept:
    mark: str
    manifest: Manifest
    num_bytes: int
    tables: dict[str, tuple[int, Any]] = field(default_factory=dict)


class Snapshots:
    """What one ``Store`` object read last; safe for threads.

    Args:
        files: The store.
    """

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0

    def manifest(self, folder: str) -> tuple[Manifest, str] | None:
        """Returns a user's newest manifest and a mark that no other manifest has.

        Raises:
            DamagedStoreError: If it changed or belongs to another folder.
        """
        path = f"{folder}/{MANIFEST}"
        try:
            data = self._files.read(path)
        except FileNotFoundError:
            self.forget(folder)
            return None
        mark = hashlib.sha256(data).hexdigest()
        with self._lock:
            kept = self._kept.get(folder)
            if kept is not None and kept.mark == mark:
                self._kept.move_to_end(folder)
                return kept.manifest, mark
        manifest = unseal(data, Manifest, path)
        if user_folder(manifest.user) != folder:
            raise DamagedStoreError(path, "it belongs to another user")
        needed = {ref.sha256 for ref in manifest.refs()}
        with self._lock:
            old = self._remove(folder)
            tables = {k: v for k, v in old.tables.items() if k in needed} if old else {}
            size = len(data) + sum(size for size, _ in tables.values())
            self._kept[folder] = _Kept(mark, manifest, size, tables)
            self._bytes += size
            self._shrink()
        return manifest, mark

    def table(self, folder: str, ref: FileRef, decode: Callable[[bytes], _T]) -> _T:
        """Returns a checked table; raises as ``read_table`` does."""
        with self._lock:
            kept = self._kept.get(folder)
            if kept is not None and ref.sha256 in kept.tables:
                return cast(_T, kept.tables[ref.sha256][1])
        found = read_table(self._files, folder, ref, decode)
        with self._lock:
            kept = self._kept.get(folder)
            # Only what the newest known manifest names: nothing of an erased fact is kept.
            named = kept is not None and any(r.sha256 == ref.sha256 for r in kept.manifest.refs())
            if kept is not None and named and ref.sha256 not in kept.tables:
                kept.tables[ref.sha256] = (ref.bytes, found)
                kept.num_bytes += ref.bytes
                self._bytes += ref.bytes
                self._shrink()
        return found

    def forget(self, folder: str) -> None:
        """Drops what is kept of a user."""
        with self._lock:
            self._remove(folder)

    def folders(self) -> list[str]:
        """Folders of the users of whom something is kept."""
        with self._lock:
            return list(self._kept)

    def _remove(self, folder: str) -> _Kept | None:
        old = self._kept.pop(folder, None)
        self._bytes -= old.num_bytes if old else 0
        return old

    def _shrink(self) -> None:
        while self._bytes > CACHE_BYTES and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].num_bytes
