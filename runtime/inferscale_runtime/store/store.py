"""The store's public face: one object for one store root."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from pydantic import JsonValue

from inferscale_runtime.errors import ConfigError, DamagedStoreError, StoreFormatError
from inferscale_runtime.store import reader, stored, users, verify, writer
from inferscale_runtime.store.erase import (
    Receipt,
    UserReceipt,
    erase_store,
    erase_user,
    leftovers_of_user,
)
from inferscale_runtime.store.files import StoreFiles
from inferscale_runtime.store.kvwriter import NewSegment, put_kv
from inferscale_runtime.store.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    MARKER,
    PREAMBLES,
    USERS,
    Preamble,
    check_fingerprint,
    check_marker,
    marker,
    seal,
    user_folder,
)
from inferscale_runtime.store.recent import recent_users
from inferscale_runtime.store.records import Segment, UserMemory
from inferscale_runtime.store.sizes import shard_bytes
from inferscale_runtime.store.snapshot import Snapshots
from inferscale_runtime.store.stored import StoredSegment
from inferscale_runtime.store.verify import StoreStats, UserStats
from inferscale_runtime.store.writer import Change

if TYPE_CHECKING:
    import torch

    from inferscale_runtime.store.tensors import StoredKV

__all__ = ["Change", "NewSegment", "Receipt", "Store", "StoreStats", "UserReceipt", "UserStats"]

_LOG = logging.getLogger(__name__)

COUNT_SECONDS = 60.0
"""How old the size of a store may be that a quota is held against; a count lists every file
(arbitrary)."""


class Store:
    """A store of users' memories; made by :meth:`open`.

    Safe for use by threads. Local stores also allow any number of writing processes; on object
    storage a user must have one writer at a time.
    """

    def __init__(self, files: StoreFiles, version: int = FORMAT_VERSION) -> None:
        self._files = files
        self._snapshots = Snapshots(files)
        self._version = version
        self._counted, self._counted_until = 0, 0.0

    @property
    def url(self) -> str:
        """The URL that the store was opened with."""
        return self._files.url

    @property
    def local(self) -> bool:
        """Whether it is a folder, and no object storage."""
        return self._files.local

    @classmethod
    def open(cls, url: str, *, create: bool = False) -> Store:
        """Opens a store.

        Args:
            url: A local folder or any fsspec URL.
            create: Make a store there when there is none.

        Raises:
            StoreFormatError: If it is no store or a newer release wrote it.
            StoreUnwritableError: If it cannot be created.
        """
        files = StoreFiles(url)
        version = FORMAT_VERSION
        try:
            version = check_marker(files.read(MARKER), url)
        except FileNotFoundError as exc:
            if not create:
                raise StoreFormatError(
                    f"'{url}' is no store: it has no {MARKER}. Check the path, or run "
                    "'inferscale encode' to make one"
                ) from exc
            files.write(MARKER, [marker()])
        return cls(files, version)

    def _upgrade(self) -> None:
        """Before the first write of this version: an older release must not misread it."""
        if self._version < FORMAT_VERSION:
            self._files.write(MARKER, [marker()])
            self._version = FORMAT_VERSION

    def users(self) -> Iterator[str]:
        """Yields the user ids; a damaged manifest is logged and left out (``verify`` names it)."""
        for stats in self.user_stats():
            yield stats.user

    def user_stats(self) -> Iterator[UserStats]:
        """Yields the sizes of each user, from the manifests alone."""
        for name in self._files.list_folders(USERS):
            try:
                manifest = reader.load_manifest(self._files, f"{USERS}/{name}")
            except DamagedStoreError as exc:
                _LOG.warning("%s", exc)
                continue
            if manifest:
                yield verify.stats_of(manifest)

    def manifest_mark(self, user: str) -> str | None:
        """Returns a text that changes with each commit of a user, None for an unknown user.

        Unlike the version it never comes again, not even for a user that was erased and came back.

        Raises:
            DamagedStoreError: If the manifest is damaged.
        """
        found = self._snapshots.manifest(user_folder(user))
        return found[1] if found else None

    def read_user(self, user: str) -> UserMemory | None:
        """Returns a user's newest version, None for an unknown user.

        A damaged index is logged and its fingerprint left out of ``encodings``.

        Raises:
            DamagedStoreError: If the manifest, the facts or the turns are damaged.
        """
        return users.read_user(self._snapshots, user)

    def commit_user(
        self, memory: UserMemory, new_segments: Mapping[str, Sequence[NewSegment]]
    ) -> UserMemory:
        """Writes a user's next version.

        Facts, turns, embeddings and tombstones replace the stored ones. Segments in
        ``memory.encodings`` are kept, except those of facts that are gone, changed or newly
        encoded, and those that read a fact or turn that is gone or changed. When something was
        deleted or changed, the epoch rises and no file holds a row of it, or of what read it, when
        this returns; otherwise files with more dead than live rows are rewritten.

        Args:
            memory: The content; its ``version`` is the one that it was made from.
            new_segments: Fingerprint -> segments to add, in any order.

        Returns:
            The memory as committed.

        Raises:
            StoreConflictError: If another writer committed this user since ``memory.version``.
            StoreUnwritableError: If the store cannot be written; the old version stays.
            ConfigError: If a limit is passed or a segment does not fit.
        """
        self._upgrade()
        return writer.commit_user(self._files, self._snapshots, memory, new_segments)

    def update_user(self, user: str, change: Change) -> UserMemory | None:
        """Reads a user, asks ``change`` what to write and writes it, all under the user's lock.

        Args:
            user: User id.
            change: From the newest version to memory and new segments, as for ``commit_user``, or
                to None to write nothing. Others wait meanwhile, so it should be quick.

        Returns:
            The memory as it is now.

        Raises:
            StoreConflictError: On object storage, if another process wrote this user meanwhile.
            DamagedStoreError: If the user cannot be read.
            StoreUnwritableError: As for ``commit_user``, as are the errors of limits.
        """
        self._upgrade()
        return writer.update_user(self._files, self._snapshots, user, change)

    def read_segments(
        self, user: str, segments: Sequence[Segment]
    ) -> list[StoredKV | DamagedStoreError]:
        """Returns each segment's KV, plain rows or quantised ones.

        Plain rows are ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]``. Only the rows of the
        segments are read. A segment whose file is missing or whose bytes changed gives the error in
        its place.
        """
        return stored.read_segments(self._files, user, segments)

    def find_segments(
        self, user: str, segments: Sequence[Segment]
    ) -> list[StoredSegment | DamagedStoreError]:
        """Returns where each segment's bytes are, to be read one by one, or what is wrong there.

        Inside of ``holding_files`` each of their files is opened only once.
        """
        return stored.find_segments(self._files, user, segments)

    def holding_files(self) -> AbstractContextManager[None]:
        """Keeps files open that this thread reads, until the block ends."""
        return self._files.holding()

    def write_preamble(
        self,
        fingerprint: str,
        fields: Mapping[str, JsonValue],
        token_ids: Sequence[int],
        kv: torch.Tensor,
    ) -> None:
        """Writes or replaces a fingerprint's preamble.

        Raises:
            ConfigError: If the KV does not have one row a token, or a field has no JSON form.
            StoreUnwritableError: If the store cannot be written.
        """
        from inferscale_runtime.store.tensors import layout_of, to_buffer  # As in stored.py.

        check_fingerprint(fingerprint)
        layout, data = layout_of([kv], [len(token_ids)]), to_buffer(kv)
        with self._files.lock(PREAMBLES):
            ref = put_kv(self._files, PREAMBLES, fingerprint, layout, lambda: [data])
            record = Preamble(
                fingerprint=fingerprint, fields=dict(fields), token_ids=tuple(token_ids), data=ref
            )
            name = f"{fingerprint}.json"
            self._files.write(f"{PREAMBLES}/{name}", [seal(record)])
            writer.remove_garbage(self._files, PREAMBLES, {ref.name}, f"{fingerprint}-")

    def read_preamble(
        self, fingerprint: str
    ) -> tuple[dict[str, JsonValue], tuple[int, ...], torch.Tensor] | None:
        """Returns fields, token ids and KV of a preamble, None when there is none.

        Raises:
            DamagedStoreError: If one of its files is missing or changed.
        """
        record = reader.load_preamble(self._files, check_fingerprint(fingerprint))
        if record is None:
            return None
        return record.fields, record.token_ids, reader.read_preamble_kv(self._files, record)

    def fingerprints(self) -> list[str]:
        """Returns the fingerprints that have a preamble, sorted."""
        names = self._files.list_files(PREAMBLES)
        return sorted(n.removesuffix(".json") for n in names if n.endswith(".json"))

    def kv_dtypes(self) -> dict[str, str]:
        """Returns how each fingerprint's KV is stored: ``int8``, ``fp8`` or the model's dtype."""
        found = {}
        for name in self.fingerprints():
            try:
                record = reader.load_preamble(self._files, name)
            except DamagedStoreError:
                record = None  # ``verify`` names it
            fields = record.fields if record else {}
            kind = fields.get("kv_dtype", "auto")
            found[name] = str(fields.get("dtype", "unknown") if kind == "auto" else kind)
        return found

    def remove_user(self, user: str) -> UserReceipt:
        """Deletes every file of a user, leftovers of interrupted writes included.

        Returns:
            What was deleted; no files for an unknown user.

        Raises:
            StoreUnwritableError: If a file cannot be deleted; calling again continues.
        """
        folder = user_folder(user)
        receipt = erase_user(self._files, folder)
        self._snapshots.forget(folder)
        return receipt

    def leftovers(self, user: str) -> list[str]:
        """Returns every file and folder of a user that is still there; see ``verify_erased``."""
        return leftovers_of_user(self._files, user_folder(user))

    @staticmethod
    def erase(url: str) -> Receipt:
        """Deletes every file of a store; see ``erase_store``. There may be none."""
        return erase_store(StoreFiles(url))

    def verify(self, user: str | None = None) -> list[str]:
        """Reads every byte that the manifests refer to and checks it.

        Args:
            user: Check this user only, without the preambles.

        Returns:
            One line for each damaged file or segment, naming it; empty when all is well.

        Raises:
            ConfigError: If there is no such user.
        """
        if user is not None:
            folder = user_folder(user)
            if MANIFEST not in self._files.list_files(folder):
                raise ConfigError(f"store '{self.url}' has no user '{user}'")
            return verify.verify_user(self._files, folder)
        problems = verify.verify_preambles(self._files)
        for name in self._files.list_folders(USERS):
            problems += verify.verify_user(self._files, f"{USERS}/{name}")
        return problems

    def recent_users(self) -> Iterator[tuple[float, str]]:
        """Yields ``(time written in seconds, user id)``, the last written first."""
        return recent_users(self._files)

    def total_bytes(self, shard: int = 0, num_shards: int = 1) -> int:
        """Returns the bytes of all files, or of those of one shard's users; lists, reads nothing.

        What belongs to no user counts for shard 0.
        """
        return shard_bytes(self._files, shard, num_shards)

    def known_bytes(self) -> int:
        """As ``total_bytes`` of everything, at most a minute old."""
        now = time.monotonic()
        if now >= self._counted_until:
            self._counted = self.total_bytes()
            self._counted_until = now + COUNT_SECONDS
        return self._counted

    def stats(self) -> StoreStats:
        """Returns users, facts, bytes and segments of the whole store."""
        return verify.store_stats(self._files)
