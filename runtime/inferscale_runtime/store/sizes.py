"""Bytes of a store, from listings alone: no manifest is read."""

from __future__ import annotations

import re

from inferscale_runtime.store.files import StoreFiles
from inferscale_runtime.store.manifest import USERS

_FOLDER = re.compile(r"[0-9a-f]{32}")


def shard_bytes(files: StoreFiles, shard: int = 0, num_shards: int = 1) -> int:
    """Sums the bytes of all files of a shard's users.

    Args:
        files: The store.
        shard: Index of the shard; what belongs to no user counts for shard 0, so that the sum over
            the shards is the whole store.
        num_shards: Number of shards.

    Returns:
        The sum.
    """
    total = 0
    for path, size in files.find().items():
        parts = path.split("/")
        owner = 0
        if len(parts) == 3 and parts[0] == USERS and _FOLDER.fullmatch(parts[1]):
            # The folder's name begins with the same hash of the user id that shards are made by.
            owner = int(parts[1][:16], 16) % num_shards
        total += size if owner == shard else 0
    return total
