"""What writing and deleting facts changes in a version of a user (pure but for the clock)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from inferscale_runtime.store.dependents import affected_by
from inferscale_runtime.store.records import Fact, Tombstone, UserMemory, tombstone

API = "api"
"""Origin of what a person wrote through the memory API; no source replaces it."""

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FactWrite:
    """One fact to write.

    Attributes:
        id: Unique within the user; an existing fact of this id is replaced.
        text: The fact, one line.
        time: Free-form time text, or None.
        turn_id: Source turn, or None.
    """

    id: str
    text: str
    time: str | None = None
    turn_id: str | None = None


def to_embed(memory: UserMemory | None, writes: Sequence[FactWrite], embedder: str) -> set[str]:
    """Texts whose embeddings the user does not have yet."""
    texts = {write.text for write in writes}
    if memory is None:
        return texts
    have = {fact.text for fact in memory.facts}
    if memory.embedder == embedder and memory.embeddings.shape[1]:
        return texts - have
    return texts | have


def merge_writes(
    memory: UserMemory | None, user: str, writes: Sequence[FactWrite], origin: str
) -> tuple[UserMemory, list[str], list[str], list[str]]:
    """Applies writes to a version; see ``living.put_facts``.

    Returns:
        The memory without new embeddings, and the ids that were created, updated and unchanged.
    """
    memory = memory or UserMemory(user, 0, (), (), "", np.zeros((0, 0), np.float32))
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    facts = {fact.id: fact for fact in memory.facts}
    stones: set[Tombstone] = set()
    created, updated, unchanged = [], [], []
    for write in writes:
        old = facts.get(write.id)
        new = Fact(write.id, write.text, write.turn_id, write.time, origin, now, now)
        if old is None:
            if tombstone("fact", origin, user, write.id) in memory.tombstones:
                unchanged.append(write.id)
                continue
            created.append(write.id)
        else:
            same = (old.text, old.time, old.turn_id) == (new.text, new.time, new.turn_id)
            if same or origin not in (API, old.origin):
                unchanged.append(write.id)
                continue
            if old.origin != origin:
                # The source that brought the old one must not bring it back.
                stones.add(tombstone("fact", old.origin, user, old.id))
            new = replace(new, created_at=old.created_at or now)
            updated.append(write.id)
        facts[write.id] = new
    stored = replace(
        memory, facts=tuple(facts.values()), tombstones=memory.tombstones | frozenset(stones)
    )
    return stored, created, updated, unchanged


def embeddings_of(old: UserMemory | None, new: UserMemory, rows: Mapping[str, Rows]) -> Rows:
    """Embeddings of all facts, from new ones by text and those of the version before."""
    known = dict(rows)
    if old is not None and old.embeddings.shape[1]:
        for fact, row in zip(old.facts, old.embeddings, strict=True):
            known.setdefault(fact.text, row)
    return np.stack([known[fact.text] for fact in new.facts])


def removed_by(
    memory: UserMemory, facts: frozenset[str], turns: frozenset[str]
) -> tuple[tuple[str, ...], int]:
    """Keys of the segments that go with these facts and turns, and how many only read them."""
    keys: list[str] = []
    invalidated = 0
    for table in memory.encodings.values():
        dependents = affected_by(facts, turns, table) - facts
        invalidated += len(dependents)
        keys += [table[i].key for i in sorted(dependents | (facts & table.keys()))]
    return tuple(keys), invalidated
