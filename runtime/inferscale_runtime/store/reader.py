"""Reading manifests, tables and preambles, with every checksum checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.store.files import StoreFiles
from inferscale_runtime.store.kvfile import read_layout
from inferscale_runtime.store.manifest import (
    MANIFEST,
    PREAMBLES,
    FileRef,
    Manifest,
    Preamble,
    unseal,
    user_folder,
)

if TYPE_CHECKING:
    import torch

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
    from inferscale_runtime.store.tensors import plain_from_buffer  # As in stored.py.

    data = read_file(files, PREAMBLES, record.data)
    layout = read_layout(files, f"{PREAMBLES}/{record.data.name}")
    if layout.packed:
        raise DamagedStoreError(f"{PREAMBLES}/{record.data.name}", "it is quantised")
    return plain_from_buffer(data[len(layout.header()) :], layout)
