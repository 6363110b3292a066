"""Writing KV files, and taking rows out of them that nobody may find any more."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.store.files import Buffer, StoreFiles
from inferscale_runtime.store.kvfile import Layout, read_layout
from inferscale_runtime.store.manifest import FileRef
from inferscale_runtime.store.records import Segment
from inferscale_runtime.store.stored import StoredSegment, locate

if TYPE_CHECKING:
    from inferscale_runtime.store.tensors import StoredKV

KV_FILE_BYTES = 16 << 20
"""Size that a KV file does not pass with more than one segment: a deletion rewrites each file that
holds a row of what goes (arbitrary: ten files are rewritten in well under a second)."""

_LOG = logging.getLogger(__name__)
Encodings = dict[str, dict[str, Segment]]


@dataclass(frozen=True, slots=True, eq=False)
class NewSegment:
    """A fact's KV that is not in the store yet; the fields are those of ``Segment``.

    Attributes:
        fact_id: The fact.
        key: Hex hash of everything the KV depends on.
        token_ids: The fact's prompt tokens.
        context_fact_ids: Facts that were read before it.
        context_turn_ids: Turns that were read before it.
        kv: Plain rows ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]`` or quantised ones.
    """

    fact_id: str
    key: str
    token_ids: tuple[int, ...]
    context_fact_ids: tuple[str, ...]
    context_turn_ids: tuple[str, ...]
    kv: StoredKV


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


def put_segments(
    files: StoreFiles, folder: str, order: Mapping[str, int], new: Sequence[NewSegment]
) -> tuple[dict[str, FileRef], dict[str, Segment]]:
    """Writes new segments of one fingerprint.

    Args:
        files: The store.
        folder: The user's folder.
        order: Fact id -> place, the order of the rows.
        new: The segments.

    Returns:
        The files by name and the segments by fact id.

    Raises:
        ConfigError: If shapes or element types differ.
    """
    # torch takes seconds to import and the commands that list a store do not need it.
    from inferscale_runtime.store.tensors import layout_of, to_buffer

    new = sorted(new, key=lambda segment: order[segment.fact_id])
    layout = layout_of([s.kv for s in new], [len(s.token_ids) for s in new])
    refs: dict[str, FileRef] = {}
    added: dict[str, Segment] = {}
    for group in _groups(new, max(1, KV_FILE_BYTES // layout.row_bytes)):
        buffers = [to_buffer(s.kv) for s in group]
        small = replace(layout, rows=sum(len(s.token_ids) for s in group))
        ref = put_kv(files, folder, "kv", small, lambda buffers=buffers: buffers)  # type: ignore[misc]
        refs[ref.name] = ref
        row = 0
        for segment, data in zip(group, buffers, strict=True):
            added[segment.fact_id] = Segment(
                segment.fact_id,
                segment.key,
                tuple(segment.token_ids),
                tuple(segment.context_fact_ids),
                tuple(segment.context_turn_ids),
                ref.name,
                row,
                crc32(data),
            )
            row += len(segment.token_ids)
    return refs, added


def _groups(new: Sequence[NewSegment], most_rows: int) -> Iterator[list[NewSegment]]:
    group: list[NewSegment] = []
    rows = 0
    for segment in new:
        if group and rows + len(segment.token_ids) > most_rows:
            yield group
            group, rows = [], 0
        group.append(segment)
        rows += len(segment.token_ids)
    yield group


def compact(
    files: StoreFiles,
    folder: str,
    encodings: Encodings,
    kv: Mapping[str, FileRef],
    *,
    strict: bool,
) -> dict[str, FileRef]:
    """Rewrites files with dead rows; updates the segments and returns the files still in use.

    Args:
        files: The store.
        folder: The user's folder.
        encodings: The segments that stay; changed in place.
        kv: The KV files of the version before.
        strict: Leave no dead row anywhere, because something was erased. A damaged segment goes
            then, since its file cannot stay. Otherwise only mostly dead files are rewritten.
    """
    live: dict[str, dict[int, Segment]] = defaultdict(dict)
    for table in encodings.values():
        for segment in table.values():
            live[segment.file][segment.row] = segment
    used: dict[str, FileRef] = {}
    moved: dict[tuple[str, int], tuple[str, int] | None] = {}
    for name, by_row in sorted(live.items()):
        segments = [by_row[row] for row in sorted(by_row)]
        ref = kv[name]
        rows = sum(s.num_tokens for s in segments)
        if rows < ref.rows if strict else 2 * rows < ref.rows:
            try:
                with files.holding():
                    ref, kept = _rewrite(files, folder, name, segments, strict)
            except DamagedStoreError as exc:
                # Keep the file as it is: verify names it, and its facts are served as text.
                _LOG.warning("%s", exc)
                if strict:
                    moved.update({(name, s.row): None for s in segments})
                    continue
            else:
                moved.update({(name, s.row): None for s in segments})
                row = 0
                for segment in kept:
                    moved[name, segment.row] = (ref.name, row)
                    row += segment.num_tokens
        used[ref.name] = ref
    _move(encodings, moved)
    return used


def _move(encodings: Encodings, moved: Mapping[tuple[str, int], tuple[str, int] | None]) -> None:
    """Gives segments their new file and row, and drops those that have none."""
    for table in encodings.values():
        for fact_id, segment in list(table.items()) if moved else ():
            was = (segment.file, segment.row)
            place = moved.get(was, was)
            if place is None:
                del table[fact_id]
            elif place != was:
                table[fact_id] = replace(segment, file=place[0], row=place[1])


def _rewrite(
    files: StoreFiles, folder: str, name: str, segments: Sequence[Segment], strict: bool
) -> tuple[FileRef, list[Segment]]:
    """Writes the live rows to a new file; returns it and the segments that it holds."""
    path = f"{folder}/{name}"
    layout = read_layout(files, path)
    kept: list[StoredSegment] = []
    for source in locate(files, path, layout, segments):
        try:
            source.data()
        except DamagedStoreError as exc:
            if not strict:
                raise
            _LOG.warning("%s", exc)
        else:
            kept.append(source)
    if not kept:
        raise DamagedStoreError(path, "none of its segments is whole")

    def parts() -> Iterator[Buffer]:
        for source in kept:
            yield source.data()

    left = [source.segment for source in kept]
    small = replace(layout, rows=sum(s.num_tokens for s in left))
    return put_kv(files, folder, "kv", small, parts), left
