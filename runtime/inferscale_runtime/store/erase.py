"""Erasing a whole store: every file of it, and nothing that is not its own."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from inferscale_runtime.errors import StoreFormatError, StoreUnwritableError
from inferscale_runtime.store.files import StoreFiles
from inferscale_runtime.store.manifest import MANIFEST, MARKER, PREAMBLES, USERS, check_marker

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
