"""Erasing a user or a whole store: every file of it, and nothing that is not its own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from inferscale_runtime.errors import DamagedStoreError, StoreFormatError, StoreUnwritableError
from inferscale_runtime.store.files import StoreFiles
from inferscale_runtime.store.manifest import (
    LOCK,
    MANIFEST,
    MARKER,
    PREAMBLES,
    USERS,
    check_marker,
)
from inferscale_runtime.store.reader import load_manifest

_OWN = re.compile(
    rf"{re.escape(MARKER)}"
    rf"|(?:{USERS}/[0-9a-f]{{32}}/|{PREAMBLES}/)[0-9a-z-]{{1,200}}\.(?:parquet|safetensors|json)"
    rf"|(?:(?:{USERS}/(?:[0-9a-f]{{32}}/)?|{PREAMBLES}/)?(?:\.lock|\.tmp-[0-9a-f]{{32}}))"
)
_OWN_FOLDERS = re.compile(rf"{USERS}(?:/[0-9a-f]{{32}})?|{PREAMBLES}")
_PASSES = 5
_BATCH = 500


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one call deleted.

    Attributes:
        files: Number of files.
        bytes: Their sizes in sum.
        names_sha256: Hex SHA-256 of their sorted relative names, each followed by a line feed.
    """

    files: int
    bytes: int
    names_sha256: str


@dataclass(frozen=True, slots=True)
class UserReceipt:
    """What the erasure of one user deleted.

    Attributes:
        folder: The user's folder, which is made from a hash of the user id.
        files: Number of files.
        bytes: Their sizes in sum.
        digests: File name -> hex SHA-256 of its bytes.
    """

    folder: str
    files: int
    bytes: int
    digests: Mapping[str, str]


def erase_user(files: StoreFiles, folder: str) -> UserReceipt:
    """Deletes a user's folder; calling again after an interruption goes on.

    Raises:
        StoreUnwritableError: If a file cannot be deleted.
    """
    if not files.has_folder(folder):
        return UserReceipt(folder, 0, 0, {})
    with files.lock(folder):
        sizes = files.list_files(folder)
        sizes.pop(LOCK, None)
        known: dict[str, str] = {}
        try:
            manifest = load_manifest(files, folder)
        except DamagedStoreError:
            manifest = None
        if manifest is not None:
            known = {ref.name: ref.sha256 for ref in manifest.refs()}
        digests = {n: known.get(n) or _digest(files, f"{folder}/{n}") for n in sorted(sizes)}
        # The manifest goes first: readers see the whole user or none.
        for name in sorted(sizes, key=lambda name: name != MANIFEST):
            files.remove(f"{folder}/{name}")
        if files.local:
            files.remove(f"{folder}/{LOCK}")
            files.remove_folder(folder)
            files.sync_folder(USERS)
    return UserReceipt(folder, len(sizes), sum(sizes.values()), digests)


def leftovers_of_user(files: StoreFiles, folder: str) -> list[str]:
    """Returns every path of the store that belongs to a user's folder, the folder included."""
    left = [name for name in files.find() if name.startswith(f"{folder}/")]
    return sorted(left) + ([folder] if folder in files.find_folders() else [])


def _digest(files: StoreFiles, path: str) -> str:
    digest = hashlib.sha256()
    try:
        for chunk in files.chunks(path):
            digest.update(chunk)
    except (DamagedStoreError, FileNotFoundError):
        return ""  # It cannot be read, but it can be deleted.
    return digest.hexdigest()


def erase_store(files: StoreFiles) -> Receipt:
    """Deletes a store; calling again after an interruption goes on.

    Users' manifests go first, so that readers see whole users or none, and the marker goes last, so
    that what is left of an interrupted erasure is still known as a store.

    Returns:
        The receipt; zeros when there is nothing.

    Raises:
        StoreFormatError: If the folder holds other things than a store's files, or is no store.
        StoreUnwritableError: If a file cannot be deleted, or a writer keeps adding files.
    """
    gone: dict[str, int] = {}
    for _ in range(_PASSES):
        found = files.find()
        _refuse_foreign(files, found)
        rest = sorted((name for name in found if name != MARKER), key=_order)
        if not rest:
            break
        for start in range(0, len(rest), _BATCH):
            batch = rest[start : start + _BATCH]
            files.remove_all(batch)
            gone.update({name: found[name] for name in batch})
    else:
        raise StoreUnwritableError(
            f"store '{files.url}' gets new files while it is erased. Stop its encoding jobs and "
            "run this again"
        )
    if MARKER in found:
        files.remove(MARKER)
        gone[MARKER] = found[MARKER]
    for folder in sorted(files.find_folders(), reverse=True):
        if _OWN_FOLDERS.fullmatch(folder):
            files.remove_folder(folder)
    files.sync_folder("")
    names = "".join(f"{name}\n" for name in sorted(gone))
    return Receipt(len(gone), sum(gone.values()), hashlib.sha256(names.encode()).hexdigest())


def _order(name: str) -> tuple[bool, bool, str]:
    return (not name.endswith(f"/{MANIFEST}"), name.startswith(PREAMBLES), name)


def _refuse_foreign(files: StoreFiles, found: dict[str, int]) -> None:
    foreign = [name for name in found if not _OWN.fullmatch(name)]
    folders = [name for name in files.find_folders() if not _OWN_FOLDERS.fullmatch(name)]
    foreign += [f"{name}/" for name in folders]
    if foreign:
        shown = ", ".join(f"'{name}'" for name in sorted(foreign)[:5])
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise StoreFormatError(
            f"'{files.url}' holds what is no part of a store: {shown}{more}. Nothing was erased; "
            "move it away, or name the store's own folder"
        )
    if found:
        if MARKER not in found:
            raise StoreFormatError(
                f"'{files.url}' is no store: it has no {MARKER}. Nothing was erased; check the path"
            )
        check_marker(files.read(MARKER), files.url)
