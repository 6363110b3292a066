"""One segment's bytes in a store, read where they are wanted (no torch until they are)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

# CRC-32 as zlib's, ten times as fast: with zlib the checksum takes longer than the reading.
from isal.isal_zlib import crc32

from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.store.files import Buffer, StoreFiles
from inferscale_runtime.store.kvfile import Layout, read_layout
from inferscale_runtime.store.manifest import KV_NAME, user_folder
from inferscale_runtime.store.records import Segment

if TYPE_CHECKING:
    from inferscale_runtime.store.tensors import StoredKV


@dataclass(frozen=True, slots=True, eq=False)
class StoredSegment:
    """Where a segment's bytes are.

    Attributes:
        files: The store.
        path: Its KV file.
        layout: Of the file.
        segment: Which rows.
        start: Of the segment in the file, in bytes.
        sent: The bytes, where object storage has sent them already.
    """

    files: StoreFiles
    path: str
    layout: Layout
    segment: Segment
    start: int
    sent: Buffer | None = None

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.segment.num_tokens * self.layout.row_bytes

    def kv(self) -> StoredKV:
        """Reads it as rows in memory of its own.

        Raises:
            DamagedStoreError: If bytes are missing or changed.
        """
        # torch takes seconds to import and the commands that list a store do not need it.
        from inferscale_runtime.store.tensors import from_buffer

        return from_buffer(self.data(), self.layout)

    def data(self) -> Buffer:
        """Reads it into memory of its own; raises as ``kv`` does."""
        data = fetch(self.files, self.path, [self])[0] if self.sent is None else self.sent
        self._check(len(data), [data])
        return data

    def read_into(self, parts: Sequence[memoryview]) -> None:
        """Reads it into memory that is there; a folder's bytes are copied only once.

        Args:
            parts: Writable bytes, ``nbytes`` together. They hold anything after an error.

        Raises:
            DamagedStoreError: If bytes are missing or changed.
        """
        if self.sent is None and self.files.local:
            try:
                count = self.files.read_into(self.path, self.start, parts)
            except FileNotFoundError as exc:
                raise DamagedStoreError(self.path, "it is missing") from exc
            self._check(count, parts)
            return
        data, done = memoryview(self.data()), 0
        for part in parts:
            part[:] = data[done : done + len(part)]
            done += len(part)

    def _check(self, count: int, parts: Sequence[Buffer]) -> None:
        value = 0
        for part in parts:
            value = crc32(part, value)
        if not count or count != self.nbytes or value != self.segment.crc32:
            what = f"crc32 of fact '{self.segment.fact_id}' does not match"
            raise DamagedStoreError(self.path, what)


def find_segments(
    files: StoreFiles, user: str, segments: Sequence[Segment]
) -> list[StoredSegment | DamagedStoreError]:
    """Returns where each segment's bytes are, or what is wrong with its file.

    A folder is read later, segment by segment; object storage sends all at once.
    """
    folder = user_folder(user)
    by_file: dict[str, list[int]] = defaultdict(list)
    for i, segment in enumerate(segments):
        by_file[segment.file].append(i)
    found: dict[int, StoredSegment | DamagedStoreError] = {}
    for name, places in by_file.items():
        path = f"{folder}/{name}"
        wanted = [segments[i] for i in places]
        try:
            # A name with a slash would reach another user's folder.
            if not KV_NAME.fullmatch(name):
                raise DamagedStoreError(path, "it is not the name of a KV file")
            layout = read_layout(files, path)
            sources = locate(files, path, layout, wanted)
            sent = [None] * len(sources) if files.local else fetch(files, path, sources)
        except DamagedStoreError as exc:
            found.update(dict.fromkeys(places, exc))
            continue
        for i, source, data in zip(places, sources, sent, strict=True):
            found[i] = replace(source, sent=data)
            if not source.segment.num_tokens:  # There would be no row to read it into.
                what = f"fact '{source.segment.fact_id}' has no tokens"
                found[i] = DamagedStoreError(path, what)
    return [found[i] for i in range(len(segments))]


def locate(
    files: StoreFiles, path: str, layout: Layout, segments: Sequence[Segment]
) -> list[StoredSegment]:
    """Returns where segments of one file are in it."""
    size, head = layout.row_bytes, len(layout.header())
    return [StoredSegment(files, path, layout, s, head + s.row * size) for s in segments]


def fetch(files: StoreFiles, path: str, sources: Sequence[StoredSegment]) -> Sequence[Buffer]:
    """Reads segments of one file at once, unchecked.

    Raises:
        DamagedStoreError: If the file is missing or cannot be read.
    """
    try:
        return files.read_ranges(path, [(s.start, s.start + s.nbytes) for s in sources])
    except FileNotFoundError as exc:
        raise DamagedStoreError(path, "it is missing") from exc


def read_segments(
    files: StoreFiles, user: str, segments: Sequence[Segment]
) -> list[StoredKV | DamagedStoreError]:
    """Returns the KV of each segment, or what is wrong with it."""
    found: list[StoredKV | DamagedStoreError] = []
    for source in find_segments(files, user, segments):
        try:
            found.append(source if isinstance(source, DamagedStoreError) else source.kv())
        except DamagedStoreError as exc:
            found.append(exc)
    return found
