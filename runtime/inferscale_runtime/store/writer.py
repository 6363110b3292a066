"""Writing: data files first, the manifest last, then the garbage of the version before."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from inferscale_runtime.errors import ConfigError, DamagedStoreError, StoreConflictError, StoreError
from inferscale_runtime.store import tables
from inferscale_runtime.store.files import Buffer, StoreFiles
from inferscale_runtime.store.kvfile import Layout, read_layout
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
from inferscale_runtime.store.reader import load_manifest, read_checked
from inferscale_runtime.store.records import Segment, UserMemory

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
_Encodings = dict[str, dict[str, Segment]]


@dataclass(frozen=True, slots=True, eq=False)
class NewSegment:
    """A fact's KV that is not in the store yet; the fields are those of ``Segment``.

    Attributes:
        fact_id: The fact.
        key: Hex hash of everything the KV depends on.
        token_ids: The fact's prompt tokens.
        context_fact_ids: Facts that were read before it.
        context_turn_ids: Turns that were read before it.
        kv: ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]``.
    """

    fact_id: str
    key: str
    token_ids: tuple[int, ...]
    context_fact_ids: tuple[str, ...]
    context_turn_ids: tuple[str, ...]
    kv: torch.Tensor


def put_bytes(files: StoreFiles, folder: str, stem: str, data: bytes, rows: int) -> FileRef:
    """Writes a table under a name made from its content."""
    digest = hashlib.sha256(data).hexdigest()
    name = f"{stem}-{digest[:32]}.parquet"
    files.write(f"{folder}/{name}", [data])
    return FileRef(name=name, sha256=digest, bytes=len(data), rows=rows)


def put_kv(
    files: StoreFiles,
    folder: str,
    stem: str,
    layout: Layout,
    parts: Callable[[], Iterable[Buffer]],
) -> FileRef:
    """Writes a KV file; ``parts`` is read twice, as the name holds a digest of the content."""
    header = layout.header()
    digest = hashlib.sha256(header)
    for part in parts():
        digest.update(part)
    name = f"{stem}-{digest.hexdigest()[:32]}.safetensors"
    files.write(f"{folder}/{name}", chain([header], parts()))
    size = len(header) + layout.rows * layout.row_bytes
    return FileRef(name=name, sha256=digest.hexdigest(), bytes=size, rows=layout.rows)


def commit_user(
    files: StoreFiles, memory: UserMemory, new_segments: Mapping[str, Sequence[NewSegment]]
) -> UserMemory:
    """Writes the next version of a user; see ``Store.commit_user``."""
    folder = user_folder(memory.user)
    memory = _checked(memory, new_segments)
    with files.lock(folder):
        current = load_manifest(files, folder)
        stored = current.version if current else 0
        if stored != memory.version:
            raise StoreConflictError(
                f"user '{memory.user}' is at version {stored}, this write began from "
                f"{memory.version}. Read the user again and repeat the write"
            )
        kv = {ref.name: ref for ref in current.kv} if current else {}
        encodings = _kept(memory, new_segments, kv)
        used = _compact(files, folder, encodings, kv)
        for fingerprint, segments in new_segments.items():
            if segments:
                ref, added = _put_segments(files, folder, memory, segments)
                used[ref.name] = ref
                encodings.setdefault(fingerprint, {}).update(added)
        order = {fact.id: i for i, fact in enumerate(memory.facts)}
        # Sorting makes the bytes independent of the order in which segments were handed in.
        encodings = {
            fingerprint: {k: table[k] for k in sorted(table, key=order.__getitem__)}
            for fingerprint, table in sorted(encodings.items())
            if table
        }
        manifest = _put_tables(files, folder, memory, encodings, used)
        files.write(f"{folder}/{MANIFEST}", [seal(manifest)])
        remove_garbage(files, folder, {ref.name for ref in manifest.refs()} | {MANIFEST, LOCK})
    return replace(memory, version=manifest.version, encodings=encodings)


def _checked(memory: UserMemory, new: Mapping[str, Sequence[NewSegment]]) -> UserMemory:
    """Refuses what the format does not allow; returns the memory with 2-D embeddings."""
    who = f"user '{memory.user}'"
    if len(memory.facts) > MAX_FACTS:
        raise ConfigError(f"{who} has {len(memory.facts)} facts, the limit is {MAX_FACTS}")
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
    known = {fact.id for fact in memory.facts}
    for fingerprint in (*memory.encodings, *new):
        check_fingerprint(fingerprint)
    for segments in new.values():
        counts = Counter(segment.fact_id for segment in segments)
        for fact_id, count in counts.items():
            if count > 1 or fact_id not in known:
                problem = "is encoded twice" if count > 1 else "is not one of its facts"
                raise ConfigError(f"{who}: segment of fact '{fact_id}' {problem}")
    rows = memory.embeddings
    if rows.size == 0 and (rows.ndim != 2 or len(rows) != len(memory.facts)):
        rows = np.zeros((len(memory.facts), 0), np.float32)
    if rows.ndim != 2 or len(rows) != len(memory.facts):
        raise ConfigError(f"{who}: embeddings have shape {rows.shape} for {len(known)} facts")
    return replace(memory, embeddings=rows)


def _kept(
    memory: UserMemory,
    new: Mapping[str, Sequence[NewSegment]],
    kv: Mapping[str, FileRef],
) -> _Encodings:
    """Returns the old segments to keep; those of removed facts and replaced ones are dropped."""
    known = {fact.id for fact in memory.facts}
    kept: _Encodings = {}
    for fingerprint, table in memory.encodings.items():
        replaced = {segment.fact_id for segment in new.get(fingerprint, ())}
        kept[fingerprint] = {k: s for k, s in table.items() if k in known and k not in replaced}
        for segment in kept[fingerprint].values():
            if segment.file not in kv:
                raise ConfigError(
                    f"user '{memory.user}': segment of fact '{segment.fact_id}' lies in "
                    f"'{segment.file}', which version {memory.version} does not have"
                )
    return kept


def _compact(
    files: StoreFiles, folder: str, encodings: _Encodings, kv: Mapping[str, FileRef]
) -> dict[str, FileRef]:
    """Rewrites mostly dead files; updates the segments and returns the files still in use."""
    live: dict[str, dict[int, Segment]] = defaultdict(dict)
    for table in encodings.values():
        for segment in table.values():
            live[segment.file][segment.row] = segment
    used: dict[str, FileRef] = {}
    moved: dict[tuple[str, int], tuple[str, int]] = {}
    for name, by_row in sorted(live.items()):
        segments = [by_row[row] for row in sorted(by_row)]
        ref = kv[name]
        if 2 * sum(s.num_tokens for s in segments) < ref.rows:
            try:
                ref = _rewrite(files, folder, name, segments)
            except DamagedStoreError as exc:
                # Keep the file as it is: verify names it, and its facts are served as text.
                _LOG.warning("%s", exc)
            else:
                row = 0
                for segment in segments:
                    moved[name, segment.row] = (ref.name, row)
                    row += segment.num_tokens
        used[ref.name] = ref
    for table in encodings.values():
        for fact_id, segment in table.items():
            if place := moved.get((segment.file, segment.row)):
                table[fact_id] = replace(segment, file=place[0], row=place[1])
    return used


def _rewrite(files: StoreFiles, folder: str, name: str, segments: Sequence[Segment]) -> FileRef:
    path = f"{folder}/{name}"
    layout = read_layout(files, path)

    def parts() -> Iterator[Buffer]:
        for segment in segments:
            part = read_checked(files, path, layout, [segment])[0]
            if isinstance(part, DamagedStoreError):
                raise part
            yield part

    small = replace(layout, rows=sum(s.num_tokens for s in segments))
    return put_kv(files, folder, "kv", small, parts)


def _put_segments(
    files: StoreFiles, folder: str, memory: UserMemory, new: Sequence[NewSegment]
) -> tuple[FileRef, dict[str, Segment]]:
    # torch takes seconds to import and the commands that list a store do not need it.
    from inferscale_runtime.store.tensors import layout_of, to_buffer

    order = {fact.id: i for i, fact in enumerate(memory.facts)}
    new = sorted(new, key=lambda segment: order[segment.fact_id])
    layout = layout_of([s.kv for s in new], [len(s.token_ids) for s in new])
    buffers = [to_buffer(s.kv) for s in new]
    ref = put_kv(files, folder, "kv", layout, lambda: buffers)
    added, row = {}, 0
    for segment, data in zip(new, buffers, strict=True):
        added[segment.fact_id] = Segment(
            segment.fact_id,
            segment.key,
            tuple(segment.token_ids),
            tuple(segment.context_fact_ids),
            tuple(segment.context_turn_ids),
            ref.name,
            row,
            zlib.crc32(data),
        )
        row += len(segment.token_ids)
    return ref, added


def _put_tables(
    files: StoreFiles,
    folder: str,
    memory: UserMemory,
    encodings: _Encodings,
    used: Mapping[str, FileRef],
) -> Manifest:
    try:
        facts = tables.facts_to_bytes(memory.facts, memory.embeddings)
        turns = tables.turns_to_bytes(memory.turns)
        indexes = {f: tables.index_to_bytes(list(t.values())) for f, t in encodings.items()}
    except (ValueError, OverflowError, TypeError) as exc:
        # The cause may quote a text, so its message stays out of ours.
        raise ConfigError(
            f"user '{memory.user}': a text is not valid Unicode or a number is out of range "
            f"({type(exc).__name__}). Correct the input"
        ) from None
    return Manifest(
        user=memory.user,
        version=memory.version + 1,
        embedder=memory.embedder,
        facts=put_bytes(files, folder, "facts", facts, len(memory.facts)),
        turns=put_bytes(files, folder, "turns", turns, len(memory.turns)),
        encodings={
            f: put_bytes(files, folder, f"index-{f[:16]}", data, len(encodings[f]))
            for f, data in indexes.items()
        },
        kv=tuple(used[name] for name in sorted(used)),
    )


def remove_garbage(files: StoreFiles, folder: str, keep: set[str], prefix: str = "") -> None:
    """Deletes what the newest version does not need; the write before it is already done."""
    try:
        for name in files.list_files(folder):
            if name not in keep and name.startswith((prefix, ".tmp-")):
                files.remove(f"{folder}/{name}")
    except StoreError as exc:
        _LOG.warning("old files stay until the next write: %s", exc)
