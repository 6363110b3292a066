"""Reading manifests, tables, segments and preambles, with every checksum checked."""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.store.files import StoreFiles
from inferscale_runtime.store.kvfile import Layout, read_layout
from inferscale_runtime.store.manifest import (
    KV_NAME,
    MANIFEST,
    PREAMBLES,
    FileRef,
    Manifest,
    Preamble,
    unseal,
    user_folder,
)
from inferscale_runtime.store.records import Segment

if TYPE_CHECKING:
    import torch

    from inferscale_runtime.store.tensors import StoredKV

_T = TypeVar("_T")


def load_manifest(files: StoreFiles, folder: str) -> Manifest | None:
    """Returns the manifest in a user's folder, None when there is none.

    Raises:
        DamagedStoreError: If it changed or belongs to another folder.
    """
    path = f"{folder}/{MANIFEST}"
    try:
        manifest = unseal(files.read(path), Manifest, path)
    except FileNotFoundError:
        return None
    if user_folder(manifest.user) != folder:
        raise DamagedStoreError(path, "it belongs to another user")
    return manifest


def read_file(files: StoreFiles, folder: str, ref: FileRef) -> bytes:
    """Returns a data file's bytes.

    Raises:
        DamagedStoreError: If it is missing or its checksum does not match.
    """
    path = f"{folder}/{ref.name}"
    try:
        data = files.read(path)
    except FileNotFoundError as exc:
        raise DamagedStoreError(path, "it is missing") from exc
    if len(data) != ref.bytes:
        raise DamagedStoreError(path, f"it has {len(data)} of {ref.bytes} bytes")
    if hashlib.sha256(data).hexdigest() != ref.sha256:
        raise DamagedStoreError(path, "its sha256 does not match")
    return data


def read_table(files: StoreFiles, folder: str, ref: FileRef, decode: Callable[[bytes], _T]) -> _T:
    """Returns a checked table.

    Raises:
        DamagedStoreError: If its bytes changed or do not have the table's columns.
    """
    data = read_file(files, folder, ref)
    try:
        return decode(data)
    except Exception as exc:  # pyarrow raises errors of many unrelated types.
        raise DamagedStoreError(f"{folder}/{ref.name}", "its table is not readable") from exc


def read_checked(
    files: StoreFiles, path: str, layout: Layout, segments: Sequence[Segment]
) -> list[bytes | bytearray | memoryview | DamagedStoreError]:
    """Returns the bytes of segments of one file, or per segment what is wrong with it."""
    size, head = layout.row_bytes, len(layout.header())
    ranges = [(head + s.row * size, head + (s.row + s.num_tokens) * size) for s in segments]
    try:
        parts = files.read_ranges(path, ranges)
    except FileNotFoundError:
        return [DamagedStoreError(path, "it is missing")] * len(segments)
    except DamagedStoreError as exc:
        return [exc] * len(segments)
    found: list[bytes | bytearray | memoryview | DamagedStoreError] = []
    for segment, part, (start, end) in zip(segments, parts, ranges, strict=True):
        if not segment.num_tokens or len(part) != end - start or zlib.crc32(part) != segment.crc32:
            found.append(
                DamagedStoreError(path, f"crc32 of fact '{segment.fact_id}' does not match")
            )
        else:
            found.append(part)
    return found


def read_segments(
    files: StoreFiles, user: str, segments: Sequence[Segment]
) -> list[StoredKV | DamagedStoreError]:
    """Returns the KV of each segment, or what is wrong with it."""
    # torch takes seconds to import and the commands that list a store do not need it.
    from inferscale_runtime.store.tensors import from_buffer

    folder = user_folder(user)
    by_file: dict[str, list[int]] = defaultdict(list)
    for i, segment in enumerate(segments):
        by_file[segment.file].append(i)
    found: dict[int, StoredKV | DamagedStoreError] = {}
    for name, places in by_file.items():
        path = f"{folder}/{name}"
        try:
            # A name with a slash would reach another user's folder.
            if not KV_NAME.fullmatch(name):
                raise DamagedStoreError(path, "it is not the name of a KV file")
            layout = read_layout(files, path)
        except DamagedStoreError as exc:
            found.update(dict.fromkeys(places, exc))
            continue
        parts = read_checked(files, path, layout, [segments[i] for i in places])
        for i, part in zip(places, parts, strict=True):
            found[i] = part if isinstance(part, DamagedStoreError) else from_buffer(part, layout)
    return [found[i] for i in range(len(segments))]


def load_preamble(files: StoreFiles, fingerprint: str) -> Preamble | None:
    """Returns a fingerprint's record, None when there is none.

    Raises:
        DamagedStoreError: If it changed.
    """
    path = f"{PREAMBLES}/{fingerprint}.json"
    try:
        record = unseal(files.read(path), Preamble, path)
    except FileNotFoundError:
        return None
    if record.fingerprint != fingerprint:
        raise DamagedStoreError(path, "it belongs to another fingerprint")
    return record


def read_preamble_kv(files: StoreFiles, record: Preamble) -> torch.Tensor:
    """Returns a preamble's KV.

    Raises:
        DamagedStoreError: If its file is missing or changed.
    """
    from inferscale_runtime.store.tensors import plain_from_buffer  # See read_segments.

    data = read_file(files, PREAMBLES, record.data)
    layout = read_layout(files, f"{PREAMBLES}/{record.data.name}")
    if layout.packed:
        raise DamagedStoreError(f"{PREAMBLES}/{record.data.name}", "it is quantised")
    return plain_from_buffer(data[len(layout.header()) :], layout)
