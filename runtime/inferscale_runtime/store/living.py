"""Writing, correcting and forgetting single facts while the store is in use (no torch, no engine).

Every call reads the user's newest version under the user's lock, changes it and commits, so that
writers of one user never lose each other's updates; what it acknowledged survives a stop of process
or machine. When a call that deletes or changes something returns, no file of the store holds the
old text, its tokens, its KV or the KV of what read it.

On object storage the lock holds within one process. A second process that commits meanwhile is
noticed before the write and the change is repeated on top of it.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from inferscale_runtime.config import QuotaConfig
from inferscale_runtime.errors import (
    ConfigError,
    PreconditionFailed,
    QuotaError,
    StoreConflictError,
)
from inferscale_runtime.store.dependents import gone_facts, gone_turns
from inferscale_runtime.store.fact_changes import (
    API,
    FactWrite,
    Rows,
    embeddings_of,
    merge_writes,
    removed_by,
    to_embed,
)
from inferscale_runtime.store.records import Fact, Tombstone, Turn, UserMemory, tombstone
from inferscale_runtime.store.store import Change, NewSegment, Store, UserReceipt

__all__ = [
    "API",
    "Deleted",
    "FactWrite",
    "Written",
    "add_segments",
    "delete_facts",
    "delete_turns",
    "erase_user",
    "put_facts",
    "verify_erased",
]

_TRIES = 20
"""Repetitions after a conflict, with pauses that grow to about a second (arbitrary)."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a write did; each list holds fact ids in the order of the writes.

    Attributes:
        version: Version of the user now.
        epoch: Epoch of the user now.
        created: New facts.
        updated: Facts with another text, time or turn than before.
        unchanged: Facts that were there already, or that this origin may not bring back.
        keys: Keys of the segments that went.
    """

    version: int
    epoch: int
    created: tuple[str, ...]
    updated: tuple[str, ...]
    unchanged: tuple[str, ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a deletion did.

    Attributes:
        version: Version of the user now, 0 for an unknown one.
        epoch: Epoch of the user now.
        deleted: Ids that were deleted.
        missing: Ids that were not there.
        invalidated: Segments that were taken out because they had it in their context.
        keys: Keys of all segments that went.
    """

    version: int
    epoch: int
    deleted: tuple[str, ...]
    missing: tuple[str, ...]
    invalidated: int
    keys: tuple[str, ...] = ()


def put_facts(
    store: Store,
    user: str,
    writes: Sequence[FactWrite],
    *,
    origin: str,
    embedder: str,
    embed: Callable[[list[str]], Rows],
    limits: QuotaConfig,
    if_version: int | None = None,
) -> Written:
    """Creates and replaces facts; blocks.

    Args:
        store: The store.
        user: User id; an unknown user comes into being.
        writes: The facts.
        origin: Who writes. ``"api"`` replaces facts of every origin; a source leaves facts of other
            origins and deleted ones alone.
        embedder: Name of the embedder; another one than before embeds all facts anew.
        embed: Texts to unit rows ``[len(texts), dim]``; called outside of the lock.
        limits: Quota.
        if_version: Write only if the user is at this version; 0 is an unknown user.

    Raises:
        PreconditionFailed: If the user is at another version than ``if_version``.
        QuotaError: If a limit would be passed; nothing is written.
        ConfigError: If a fact does not fit the format, or an id occurs twice.
        StoreError: If the store cannot be read or written.
    """
    twice = [i for i, n in Counter(write.id for write in writes).items() if n > 1]
    if twice:
        raise ConfigError(f"fact id '{twice[0]}' occurs twice in one write. Send it once")
    rows: dict[str, Rows] = {}
    done: Written | None = None
    old = store.read_user(user)
    while True:
        needed = to_embed(old, writes, embedder) - rows.keys()
        if needed:
            texts = sorted(needed)
            rows.update(zip(texts, np.asarray(embed(texts), np.float32), strict=True))

        def change(
            memory: UserMemory | None,
        ) -> tuple[UserMemory, Mapping[str, Sequence[NewSegment]]] | None:
            nonlocal old, done
            _check_version(user, memory, if_version)
            old, done = memory, None
            if not rows.keys() >= to_embed(memory, writes, embedder):
                return None  # Another writer came first: embed what is new since.
            wanted, created, updated, unchanged = merge_writes(memory, user, writes, origin)
            changed = bool(created or updated)
            if memory is not None and not changed and memory.embedder in ("", embedder):
                done = _written(memory, memory, created, updated, unchanged)
                return None
            _check_limits(store, wanted, writes, limits)
            wanted = replace(
                wanted, embedder=embedder, embeddings=embeddings_of(memory, wanted, rows)
            )
            done = _written(memory, wanted, created, updated, unchanged)
            return wanted, {}

        now = _update(store, user, change)
        if done is not None:
            return replace(done, version=now.version, epoch=now.epoch) if now else done


def delete_facts(
    store: Store,
    user: str,
    ids: Sequence[str],
    *,
    origin: str = API,
    if_version: int | None = None,
) -> Deleted:
    """Deletes facts and the KV of all that read them; blocks.

    Args:
        store: The store.
        user: User id.
        ids: The facts.
        origin: Who deletes. ``"api"`` deletes facts of every origin, and their source cannot bring
            them back; a source deletes its own.
        if_version: As for ``put_facts``.

    Raises:
        PreconditionFailed: As for ``put_facts``.
        StoreError: As for ``put_facts``. After a ``StoreUnwritableError`` call it again: old files
            may be left.
    """

    def remove(memory: UserMemory) -> tuple[UserMemory, set[str]]:
        gone, stones = _leaving("fact", memory.facts, user, ids, origin)
        keep = [n for n, fact in enumerate(memory.facts) if fact.id not in gone]
        left = replace(
            memory,
            facts=tuple(memory.facts[n] for n in keep),
            embeddings=memory.embeddings[keep],
            tombstones=memory.tombstones | stones,
        )
        return left, gone

    return _delete(store, user, ids, remove, if_version)


def delete_turns(
    store: Store,
    user: str,
    ids: Sequence[str],
    *,
    origin: str = API,
    if_version: int | None = None,
) -> Deleted:
    """Deletes turns and the KV of all that read them; facts that came from them stay.

    Arguments and errors are those of ``delete_facts``.
    """

    def remove(memory: UserMemory) -> tuple[UserMemory, set[str]]:
        gone, stones = _leaving("turn", memory.turns, user, ids, origin)
        left = replace(
            memory,
            turns=tuple(turn for turn in memory.turns if turn.id not in gone),
            facts=tuple(replace(f, turn_id=None) if f.turn_id in gone else f for f in memory.facts),
            tombstones=memory.tombstones | stones,
        )
        return left, gone

    return _delete(store, user, ids, remove, if_version)


def erase_user(store: Store, user: str) -> UserReceipt:
    """Deletes every byte of a user; calling again after an error goes on."""
    return store.remove_user(user)


def verify_erased(store: Store, user: str) -> list[str]:
    """Returns the files and folders that are left of a user, nothing when there are none."""
    return store.leftovers(user)


def add_segments(
    store: Store, read: UserMemory, new: Mapping[str, Sequence[NewSegment]]
) -> tuple[UserMemory | None, int]:
    """Commits what an encoder made from a version that may be old by now; blocks.

    Segments of facts that are gone or changed since, and those that read such a fact or turn, are
    dropped.

    Args:
        store: The store.
        read: The version that the encoder read.
        new: Fingerprint -> segments.

    Returns:
        The user now, None when it was erased meanwhile, and how many segments were dropped.
    """
    dropped = 0

    def change(
        memory: UserMemory | None,
    ) -> tuple[UserMemory, Mapping[str, Sequence[NewSegment]]] | None:
        nonlocal dropped
        if memory is None:
            dropped = sum(len(segments) for segments in new.values())
            return None
        facts = gone_facts(read.facts, memory.facts)
        turns = gone_turns(read.turns, memory.turns)
        usable = {
            fingerprint: [
                s
                for s in segments
                if s.fact_id not in facts
                and facts.isdisjoint(s.context_fact_ids)
                and turns.isdisjoint(s.context_turn_ids)
            ]
            for fingerprint, segments in new.items()
        }
        dropped = sum(len(new[fingerprint]) - len(usable[fingerprint]) for fingerprint in new)
        return (memory, usable) if any(usable.values()) else None

    return _update(store, read.user, change), dropped


def _update(store: Store, user: str, change: Change) -> UserMemory | None:
    for left in reversed(range(_TRIES)):
        try:
            return store.update_user(user, change)
        except PreconditionFailed:
            raise
        except StoreConflictError:
            if not left:
                raise
            time.sleep(random.uniform(0, min(1.0, 0.02 * 2 ** (_TRIES - left))))
    raise AssertionError("unreachable")


def _check_version(user: str, memory: UserMemory | None, wanted: int | None) -> None:
    version = memory.version if memory else 0
    if wanted is not None and wanted != version:
        raise PreconditionFailed(user, wanted, version)


def _check_limits(
    store: Store, wanted: UserMemory, writes: Sequence[FactWrite], limits: QuotaConfig
) -> None:
    most = limits.max_facts_per_user
    if most is not None and len(wanted.facts) > most:
        raise QuotaError(
            f"user '{wanted.user}' would have {len(wanted.facts)} facts, quota.max_facts_per_user "
            f"is {most}; delete facts of this user or raise the limit. Nothing was written"
        )
    if limits.max_store_bytes is not None:
        size = sum(len(write.text.encode()) for write in writes)
        if store.known_bytes() + size > limits.max_store_bytes:
            raise QuotaError(
                f"user '{wanted.user}': the store has {store.known_bytes()} bytes, "
                f"quota.max_store_bytes is {limits.max_store_bytes}; delete users or facts, or "
                "raise the limit. Nothing was written"
            )


def _written(
    old: UserMemory | None,
    new: UserMemory,
    created: Iterable[str],
    updated: Iterable[str],
    unchanged: Iterable[str],
) -> Written:
    gone = gone_facts(old.facts, new.facts) if old else frozenset[str]()
    keys, _ = removed_by(old, gone, frozenset()) if old else ((), 0)
    return Written(new.version, new.epoch, tuple(created), tuple(updated), tuple(unchanged), keys)


def _leaving(
    kind: str, records: Sequence[Fact | Turn], user: str, ids: Sequence[str], origin: str
) -> tuple[set[str], set[Tombstone]]:
    """Which of the ids go, and what keeps their source from bringing them back."""
    wanted = {*ids}
    gone = [r for r in records if r.id in wanted and origin in (API, r.origin)]
    stones = {tombstone(kind, r.origin, user, r.id) for r in gone if r.origin != origin}
    return {r.id for r in gone}, stones


def _delete(
    store: Store,
    user: str,
    ids: Sequence[str],
    remove: Callable[[UserMemory], tuple[UserMemory, set[str]]],
    if_version: int | None,
) -> Deleted:
    gone: set[str] = set()
    keys: tuple[str, ...] = ()
    invalidated = 0

    def change(
        memory: UserMemory | None,
    ) -> tuple[UserMemory, Mapping[str, Sequence[NewSegment]]] | None:
        nonlocal gone, keys, invalidated
        gone, keys, invalidated = set(), (), 0
        _check_version(user, memory, if_version)
        if memory is None:
            return None
        left, gone = remove(memory)
        if not gone:
            return None
        facts = gone_facts(memory.facts, left.facts)
        turns = gone_turns(memory.turns, left.turns)
        keys, invalidated = removed_by(memory, facts, turns)
        return left, {}

    now = _update(store, user, change)
    order = dict.fromkeys(ids)
    return Deleted(
        now.version if now else 0,
        now.epoch if now else 0,
        tuple(i for i in order if i in gone),
        tuple(i for i in order if i not in gone),
        invalidated,
        keys,
    )
