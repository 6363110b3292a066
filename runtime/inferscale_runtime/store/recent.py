"""Which users were written last, from a listing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.store.files import StoreFiles
from inferscale_runtime.store.manifest import MANIFEST, USERS
from inferscale_runtime.store.reader import load_manifest

# What fsspec's file systems call the time of the last change.
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


def recent_users(files: StoreFiles) -> Iterator[tuple[float, str]]:
    """Yields ``(time in seconds, user id)``, the last written first; reads manifests as it goes.

    Users whose manifest is damaged are passed over.
    """
    found = []
    for path, details in files.details(USERS).items():
        parts = path.split("/")
        if len(parts) == 3 and parts[2] == MANIFEST:
            found.append((_written(details), f"{parts[0]}/{parts[1]}"))
    for written, folder in sorted(found, reverse=True):
        try:
            manifest = load_manifest(files, folder)
        except DamagedStoreError:
            continue
        if manifest is not None:
            yield written, manifest.user


def _written(details: dict[str, Any]) -> float:
    for name in _TIMES:
        value = details.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
    return 0.0
