"""Which users a job reads (pure)."""

from __future__ import annotations

import hashlib


def in_shard(user: str, shard: int, num_shards: int) -> bool:
    """Whether a user belongs to a shard: by hash, so that all shards agree without talking."""
    return int.from_bytes(hashlib.sha256(user.encode()).digest()[:8], "big") % num_shards == shard
