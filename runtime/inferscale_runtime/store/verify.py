"""Checking every byte of a store and counting what it holds."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.store import tables
from inferscale_runtime.store.files import StoreFiles
from inferscale_runtime.store.kvfile import read_layout
from inferscale_runtime.store.manifest import LOCK, MANIFEST, PREAMBLES, USERS, FileRef, Manifest
from inferscale_runtime.store.reader import load_manifest, load_preamble, read_table
from inferscale_runtime.store.records import Segment
from inferscale_runtime.store.stored import locate


@dataclass(frozen=True, slots=True)
class UserStats:
    """Sizes of one user, taken from the manifest alone.

    Attributes:
        user: The user id.
        version: Version of the manifest.
        facts: Number of facts.
        turns: Number of turns.
        bytes: Bytes of the data files.
        segments: Fingerprint -> number of encoded facts.
    """

    user: str
    version: int
    facts: int
    turns: int
    bytes: int
    segments: dict[str, int]

    def pending(self, fingerprint: str) -> int:
        """Facts that have no segment of a fingerprint."""
        return self.facts - self.segments.get(fingerprint, 0)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Sizes of a store.

    Attributes:
        users: Users whose manifest is readable.
        facts: Their facts.
        bytes: Bytes of all files, garbage included.
        garbage_bytes: Bytes of users' files that no manifest refers to.
        segments: Fingerprint -> number of encoded facts.
        damaged: Manifests that are not readable.
    """

    users: int = 0
    facts: int = 0
    bytes: int = 0
    garbage_bytes: int = 0
    segments: dict[str, int] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()


def stats_of(manifest: Manifest) -> UserStats:
    """Returns the sizes that a manifest tells."""
    return UserStats(
        manifest.user,
        manifest.version,
        manifest.num_facts,
        manifest.turns.rows,
        # Two tables with equal content are one file.
        sum({ref.name: ref.bytes for ref in manifest.refs()}.values()),
        {fingerprint: ref.rows for fingerprint, ref in manifest.encodings.items()},
    )


def store_stats(files: StoreFiles) -> StoreStats:
    """Counts a whole store by its manifests and listings."""
    users = facts = garbage = 0
    total = sum(files.list_files("").values()) + sum(files.list_files(PREAMBLES).values())
    segments: Counter[str] = Counter()
    damaged = []
    for name in files.list_folders(USERS):
        folder = f"{USERS}/{name}"
        sizes = files.list_files(folder)
        total += sum(sizes.values())
        try:
            manifest = load_manifest(files, folder)
        except DamagedStoreError as exc:
            damaged.append(exc.path)
            continue
        keep = {MANIFEST, LOCK} | ({r.name for r in manifest.refs()} if manifest else set())
        garbage += sum(size for file, size in sizes.items() if file not in keep)
        if manifest:
            users += 1
            facts += manifest.num_facts
            segments.update(stats_of(manifest).segments)
    return StoreStats(users, facts, total, garbage, dict(segments), tuple(damaged))


def verify_preambles(files: StoreFiles) -> list[str]:
    """Returns one line for each damaged file of the preambles."""
    problems = []
    for name in sorted(files.list_files(PREAMBLES)):
        if not name.endswith(".json"):
            continue
        try:
            record = load_preamble(files, name.removesuffix(".json"))
            if record:
                problems += _check_kv(files, PREAMBLES, record.data)
        except DamagedStoreError as exc:
            problems.append(str(exc))
    return problems


def verify_user(files: StoreFiles, folder: str) -> list[str]:
    """Returns one line for each damaged file and segment in a user's folder."""
    try:
        manifest = load_manifest(files, folder)
    except DamagedStoreError as exc:
        return [str(exc)]
    if manifest is None:
        return []
    problems, fact_ids = _check_tables(files, folder, manifest)
    by_file: dict[str, list[Segment]] = defaultdict(list)
    for ref in manifest.encodings.values():
        try:
            table = read_table(files, folder, ref, tables.index_from_bytes)
        except DamagedStoreError as exc:
            problems.append(str(exc))
            continue
        for segment in table.values():
            by_file[segment.file].append(segment)
            if fact_ids is not None and segment.fact_id not in fact_ids:
                path = f"{folder}/{ref.name}"
                problems.append(str(DamagedStoreError(path, f"no fact '{segment.fact_id}'")))
    known = {ref.name for ref in manifest.kv}
    for name in by_file.keys() - known:
        problems.append(str(DamagedStoreError(f"{folder}/{name}", "the manifest lacks it")))
    for ref in manifest.kv:
        with files.holding():
            problems += _check_kv(files, folder, ref)
            problems += _check_segments(files, f"{folder}/{ref.name}", by_file[ref.name])
    return problems


def _check_tables(
    files: StoreFiles, folder: str, manifest: Manifest
) -> tuple[list[str], set[str] | None]:
    """Returns problems and the ids of the facts, None when they are not all known."""
    problems = []
    fact_ids: set[str] | None = set()
    for ref in manifest.facts:
        try:
            facts, _ = read_table(files, folder, ref, tables.facts_from_bytes)
        except DamagedStoreError as exc:
            problems.append(str(exc))
            fact_ids = None
        else:
            if fact_ids is not None:
                fact_ids |= {fact.id for fact in facts}
    checks: list[tuple[FileRef | None, Callable[[bytes], object]]] = [
        (manifest.turns, tables.turns_from_bytes),
        (manifest.tombstones, tables.tombstones_from_bytes),
    ]
    for other, decode in checks:
        try:
            if other is not None:
                read_table(files, folder, other, decode)
        except DamagedStoreError as exc:
            problems.append(str(exc))
    return problems, fact_ids


def _check_kv(files: StoreFiles, folder: str, ref: FileRef) -> list[str]:
    path = f"{folder}/{ref.name}"
    digest = hashlib.sha256()
    try:
        for chunk in files.chunks(path):
            digest.update(chunk)
        if digest.hexdigest() != ref.sha256:
            raise DamagedStoreError(path, "its sha256 does not match")
        if read_layout(files, path).rows != ref.rows:
            raise DamagedStoreError(path, f"it does not have {ref.rows} rows")
    except FileNotFoundError:
        return [str(DamagedStoreError(path, "it is missing"))]
    except DamagedStoreError as exc:
        return [str(exc)]
    return []


def _check_segments(files: StoreFiles, path: str, segments: list[Segment]) -> Iterator[str]:
    try:
        layout = read_layout(files, path)
    except DamagedStoreError:
        return  # The file's own line is enough.
    for source in locate(files, path, layout, segments):
        try:
            source.data()  # One at a time, as a file may be larger than memory.
        except DamagedStoreError as exc:
            yield str(exc)
