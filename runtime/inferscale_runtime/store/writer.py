"""Writing: data files first, the manifest last, then the garbage of the version before."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from inferscale_runtime.errors import ConfigError, DamagedStoreError, StoreConflictError, StoreError
from inferscale_runtime.store import tables
from inferscale_runtime.store.dependents import affected_by, gone_facts, gone_turns
from inferscale_runtime.store.files import StoreFiles
from inferscale_runtime.store.kvwriter import Encodings, NewSegment, compact, put_segments
from inferscale_runtime.store.manifest import (
    LOCK,
    MANIFEST,
    MAX_FACT_CHARS,
    MAX_FACTS,
    FileRef,
    Manifest,
    check_fingerprint,
    seal,
    user_folder,
)
from inferscale_runtime.store.parts import plan_parts
from inferscale_runtime.store.records import UserMemory
from inferscale_runtime.store.snapshot import Snapshots
from inferscale_runtime.store.users import Version, read_version

_LOG = logging.getLogger(__name__)

NewSegments = Mapping[str, Sequence[NewSegment]]
#: From a user's newest version, None for an unknown user, to what is to be written; None writes
#: nothing.
Change = Callable[[UserMemory | None], tuple[UserMemory, NewSegments] | None]


def first_epoch() -> int:
    """The epoch of a new user, in [0, 2**52).

    It is drawn, so that a user who was erased and comes back hits no prefix-cache block of before.
    """
    return secrets.randbelow(1 << 52)


def put_bytes(files: StoreFiles, folder: str, stem: str, data: bytes, rows: int) -> FileRef:
    """Writes a table under a name made from its content."""
    digest = hashlib.sha256(data).hexdigest()
    name = f"{stem}-{digest[:32]}.parquet"
    files.write(f"{folder}/{name}", [data])
    return FileRef(name=name, sha256=digest, bytes=len(data), rows=rows)


def commit_user(
    files: StoreFiles, snapshots: Snapshots, memory: UserMemory, new_segments: NewSegments
) -> UserMemory:
    """Writes the next version of a user; see ``Store.commit_user``."""
    folder = user_folder(memory.user)
    memory = _checked(memory, new_segments)
    with files.lock(folder):
        found = snapshots.manifest(folder)
        manifest = found[0] if found else None
        stored = manifest.version if manifest else 0
        if stored != memory.version:
            raise StoreConflictError(
                f"user '{memory.user}' is at version {stored}, this write began from "
                f"{memory.version}. Read the user again and repeat the write"
            )
        try:
            current = read_version(snapshots, folder)
        except DamagedStoreError as exc:
            _LOG.warning("%s", exc)
            current = None
        return _commit(files, folder, manifest, current, memory, new_segments)


def update_user(
    files: StoreFiles, snapshots: Snapshots, user: str, change: Change
) -> UserMemory | None:
    """Reads and writes a user under its lock; see ``Store.update_user``."""
    folder = user_folder(user)
    with files.lock(folder):
        current = read_version(snapshots, folder)
        memory = current.memory() if current else None
        wanted = change(memory)
        if wanted is None:
            return memory
        found = snapshots.manifest(folder)
        if (found[0].version if found else 0) != wanted[0].version:
            raise StoreConflictError(f"user '{user}' was written meanwhile. Repeat the write")
        manifest = current.manifest if current else None
        new = _checked(wanted[0], wanted[1])
        return _commit(files, folder, manifest, current, new, wanted[1])


def _commit(
    files: StoreFiles,
    folder: str,
    manifest: Manifest | None,
    current: Version | None,
    memory: UserMemory,
    new_segments: NewSegments,
) -> UserMemory:
    """Writes under the lock. ``current`` is None for a new user and for one that is damaged."""
    facts, turns = frozenset[str](), frozenset[str]()
    if current is not None:
        facts = gone_facts(current.facts, memory.facts)
        turns = gone_turns(current.turns, memory.turns)
    # What a damaged version held is not known, so anything of it may be gone now.
    erasing = bool(facts or turns) or (manifest is not None and current is None)
    kv = {ref.name: ref for ref in manifest.kv} if manifest else {}
    encodings = _kept(memory, new_segments, kv, facts, turns)
    if current is not None and not erasing and encodings == current.encodings:
        used = kv  # The commit before has left no more dead rows than may be.
    else:
        used = compact(files, folder, encodings, kv, strict=erasing)
    order = {fact.id: i for i, fact in enumerate(memory.facts)}
    for fingerprint, segments in new_segments.items():
        if segments:
            refs, added = put_segments(files, folder, order, segments)
            used = {**used, **refs}
            encodings.setdefault(fingerprint, {}).update(added)
    # Sorting makes the bytes independent of the order in which segments were handed in.
    encodings = {
        fingerprint: {k: table[k] for k in sorted(table, key=order.__getitem__)}
        for fingerprint, table in sorted(encodings.items())
        if table
    }
    epoch = manifest.epoch + erasing if manifest else first_epoch()
    memory = replace(memory, version=memory.version + 1, epoch=epoch, encodings=encodings)
    written = _put_tables(files, folder, current, memory, used)
    files.write(f"{folder}/{MANIFEST}", [seal(written)])
    keep = {ref.name for ref in written.refs()} | {MANIFEST, LOCK}
    remove_garbage(files, folder, keep, strict=erasing)
    return memory


def _checked(memory: UserMemory, new: NewSegments) -> UserMemory:
    """Refuses what the format does not allow; returns the memory with 2-D embeddings."""
    who = f"user '{memory.user}'"
    if len(memory.facts) > MAX_FACTS:
        raise ConfigError(f"{who} has {len(memory.facts)} facts, the limit is {MAX_FACTS}")
    if len(memory.tombstones) > MAX_FACTS:
        raise ConfigError(
            f"{who} has {len(memory.tombstones)} tombstones, the limit is {MAX_FACTS}. Remove the "
            "deleted facts from their source and encode it again"
        )
    for fact in memory.facts:
        if len(fact.text) > MAX_FACT_CHARS:
            raise ConfigError(
                f"{who}: fact '{fact.id}' has {len(fact.text)} characters, the limit is "
                f"{MAX_FACT_CHARS}. Split it"
            )
    for kind, ids in (
        ("fact", [f.id for f in memory.facts]),
        ("turn", [t.id for t in memory.turns]),
    ):
        twice = [i for i, n in Counter(ids).items() if n > 1]
        if twice:
            raise ConfigError(f"{who}: {kind} id '{twice[0]}' occurs twice. Ids must be unique")
    _check_segments(memory, new)
    rows = memory.embeddings
    if rows.size == 0 and (rows.ndim != 2 or len(rows) != len(memory.facts)):
        rows = np.zeros((len(memory.facts), 0), np.float32)
    if rows.ndim != 2 or len(rows) != len(memory.facts):
        raise ConfigError(
            f"{who}: embeddings have shape {rows.shape} for {len(memory.facts)} facts"
        )
    return replace(memory, embeddings=rows)


def _check_segments(memory: UserMemory, new: NewSegments) -> None:
    who = f"user '{memory.user}'"
    known = {fact.id for fact in memory.facts}
    for fingerprint in (*memory.encodings, *new):
        check_fingerprint(fingerprint)
    for segments in new.values():
        counts = Counter(segment.fact_id for segment in segments)
        for fact_id, count in counts.items():
            if count > 1 or fact_id not in known:
                problem = "is encoded twice" if count > 1 else "is not one of its facts"
                raise ConfigError(f"{who}: segment of fact '{fact_id}' {problem}")


def _kept(
    memory: UserMemory,
    new: NewSegments,
    kv: Mapping[str, FileRef],
    facts: frozenset[str],
    turns: frozenset[str],
) -> Encodings:
    """Returns the old segments to keep.

    Those of facts that are gone, changed or newly encoded are dropped, and so is what read a fact
    or turn that is gone or changed.
    """
    known = {fact.id for fact in memory.facts}
    kept: Encodings = {}
    for fingerprint, table in memory.encodings.items():
        dropped = {segment.fact_id for segment in new.get(fingerprint, ())} | facts
        dropped |= affected_by(facts, turns, table)
        kept[fingerprint] = {k: s for k, s in table.items() if k in known and k not in dropped}
        for segment in kept[fingerprint].values():
            if segment.file not in kv:
                raise ConfigError(
                    f"user '{memory.user}': segment of fact '{segment.fact_id}' lies in "
                    f"'{segment.file}', which version {memory.version} does not have"
                )
    return kept


def _put_tables(
    files: StoreFiles,
    folder: str,
    current: Version | None,
    memory: UserMemory,
    used: Mapping[str, FileRef],
) -> Manifest:
    """Writes the tables that differ from those of the version before."""
    before = current.manifest if current else None

    def put(stem: str, data: bytes, rows: int) -> FileRef:
        return put_bytes(files, folder, stem, data, rows)

    turns, stones = before.turns if before else None, before.tombstones if before else None
    indexes = {}
    try:
        if current is None or current.turns != memory.turns:
            turns = put("turns", tables.turns_to_bytes(memory.turns), len(memory.turns))
        facts = _put_facts(files, folder, current, memory)
        if current is None or current.tombstones != memory.tombstones:
            data = tables.tombstones_to_bytes(memory.tombstones)
            count = len(memory.tombstones)
            stones = put("tombstones", data, count) if count else None
        for name, table in memory.encodings.items():
            old = current.encodings.get(name) if current else None
            if before is not None and old is not None and old == table:
                indexes[name] = before.encodings[name]
            else:
                data = tables.index_to_bytes(list(table.values()))
                indexes[name] = put(f"index-{name[:16]}", data, len(table))
    except (ValueError, OverflowError, TypeError) as exc:
        # The cause may quote a text, so its message stays out of ours.
        raise ConfigError(
            f"user '{memory.user}': a text is not valid Unicode or a number is out of range "
            f"({type(exc).__name__}). Correct the input"
        ) from None
    assert turns is not None
    return Manifest(
        user=memory.user,
        version=memory.version,
        epoch=memory.epoch,
        embedder=memory.embedder,
        facts=facts,
        turns=turns,
        tombstones=stones,
        encodings=indexes,
        kv=tuple(used[name] for name in sorted(used)),
    )


def _put_facts(
    files: StoreFiles, folder: str, current: Version | None, memory: UserMemory
) -> tuple[FileRef, ...]:
    old = current.parts if current else []
    stored = {ref.name: rows for ref, _, rows in old}
    refs = []
    for part in plan_parts(memory.facts, [(ref, facts) for ref, facts, _ in old]):
        rows = memory.embeddings[part.start : part.end]
        if part.kept is not None and np.array_equal(stored[part.kept.name], rows):
            refs.append(part.kept)
            continue
        data = tables.facts_to_bytes(memory.facts[part.start : part.end], rows)
        refs.append(put_bytes(files, folder, "facts", data, part.end - part.start))
    return tuple(refs)


def remove_garbage(
    files: StoreFiles, folder: str, keep: set[str], prefix: str = "", *, strict: bool = False
) -> None:
    """Deletes what the newest version does not need; the write before it is already done.

    Args:
        files: The store.
        folder: Where.
        keep: Names to leave.
        prefix: Only names that begin so.
        strict: Something was erased, so that a file that stays is an error.
    """
    try:
        for name in files.list_names(folder):
            if name not in keep and name.startswith((prefix, ".tmp-")):
                files.remove(f"{folder}/{name}")
        if strict:
            files.sync_folder(folder)
    except StoreError as exc:
        if strict:
            raise
        _LOG.warning("old files stay until the next write: %s", exc)
