"""File access of the store: atomic writes, range reads and locks over any fsspec file system."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from inferscale_runtime.errors import DamagedStoreError, StoreFormatError, StoreUnwritableError

Buffer = bytes | bytearray | memoryview

#: Called with a name before every operation that changes a file. Tests replace it to stop a writer
#: at each of them; it does nothing otherwise.
on_step: Callable[[str], None] = lambda name: None  # noqa: E731

_MISSING = (FileNotFoundError, NotADirectoryError)
_LOCKS = tuple(threading.Lock() for _ in range(64))
#: Files that one thread keeps open at most (arbitrary): far from a process's usual limit of 1,024.
_MOST_HELD = 64


class StoreFiles:
    """The files below one root; paths are relative to it and use ``/``.

    Args:
        url: A local folder or any fsspec URL.

    Raises:
        StoreFormatError: If no file system serves the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs: Any
        try:
            # Listings must be fresh: other processes commit to the same store.
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError) as exc:
            raise StoreFormatError(
                f"store '{url}' cannot be opened: {exc}. Give a folder or a supported URL"
            ) from exc
        self._root = str(root).rstrip("/")
        self.local = isinstance(self._fs, LocalFileSystem)
        self._held = threading.local()

    def path(self, rel: str) -> str:
        """Returns the path that the file system knows ``rel`` by."""
        return f"{self._root}/{rel}" if rel else self._root

    def read(self, rel: str) -> bytes:
        """Returns a whole file.

        Raises:
            FileNotFoundError: If there is none.
            DamagedStoreError: If it cannot be read.
        """
        with _reading(rel):
            data: bytes = self._fs.cat_file(self.path(rel))
            return data

    def size(self, rel: str) -> int:
        """Returns a file's length in bytes; raises as :meth:`read` does."""
        with _reading(rel):
            return int(self._fs.info(self.path(rel))["size"])

    def read_ranges(self, rel: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Returns the bytes of each ``(start, end)``, shorter where the file ends early."""
        path = self.path(rel)
        with _reading(rel):
            if not self.local:
                found: list[Buffer] = self._fs.cat_ranges(
                    [path] * len(ranges),
                    [start for start, _ in ranges],
                    [end for _, end in ranges],
                    on_error="raise",
                )
                return found
            parts: list[Buffer] = []
            with self._opened(path) as handle:
                for start, end in ranges:
                    part = bytearray(end - start)
                    handle.seek(start)
                    done = _fill(handle, memoryview(part))
                    parts.append(part if done == len(part) else part[:done])
            return parts

    def read_into(self, rel: str, start: int, parts: Sequence[memoryview]) -> int:
        """Reads a local file from ``start`` on into buffers; returns how many bytes there were."""
        total = 0
        with _reading(rel), self._opened(self.path(rel)) as handle:
            handle.seek(start)
            for part in parts:
                done = _fill(handle, part)
                total += done
                if done < len(part):
                    break
        return total

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Opens a local file only once while the block runs, in this thread.

        Each opening is a round trip on a network file system. A file that is replaced meanwhile is
        read as it was. Blocks cannot be nested.
        """
        held: dict[str, FileIO] = {}
        self._held.files = held
        try:
            yield
        finally:
            del self._held.files
            for handle in held.values():
                handle.close()

    @contextmanager
    def _opened(self, path: str) -> Iterator[FileIO]:
        held: dict[str, FileIO] | None = getattr(self._held, "files", None)
        if held is None or (path not in held and len(held) >= _MOST_HELD):
            with FileIO(path) as handle:
                yield handle
            return
        if path not in held:
            held[path] = FileIO(path)
        yield held[path]

    def chunks(self, rel: str, size: int = 8 << 20) -> Iterator[Buffer]:
        """Yields a file in pieces, so that hashing it needs little memory."""
        total = self.size(rel)
        for start in range(0, total, size):
            yield self.read_ranges(rel, [(start, min(total, start + size))])[0]

    def has_folder(self, folder: str) -> bool:
        """Tells whether a folder exists, on object stores whether it holds anything."""
        return bool(self._fs.isdir(self.path(folder)))

    def list_files(self, folder: str) -> dict[str, int]:
        """Returns name and size of every file directly in a folder, empty when it is missing."""
        return {_name(i): int(i["size"] or 0) for i in self._list(folder) if i["type"] == "file"}

    def list_names(self, folder: str) -> list[str]:
        """Returns the names of the files in a folder, without looking at each."""
        if not self.local:
            return list(self.list_files(folder))
        try:
            with _reading(folder):
                return os.listdir(self.path(folder))
        except FileNotFoundError:
            return []

    def list_folders(self, folder: str) -> list[str]:
        """Returns the sorted names of the folders directly in a folder."""
        return sorted(_name(i) for i in self._list(folder) if i["type"] == "directory")

    def _list(self, folder: str) -> list[dict[str, Any]]:
        try:
            with _reading(folder):
                found: list[dict[str, Any]] = self._fs.ls(self.path(folder), detail=True)
                return found
        except FileNotFoundError:
            return []

    def find(self) -> dict[str, int]:
        """Returns relative path and size of every file below the root, hidden ones included."""
        if self.local:
            return self._find_local()
        try:
            with _reading(""):
                found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        prefix = self._root + "/"
        return {
            str(path).removeprefix(prefix): int(info["size"] or 0)
            for path, info in found.items()
            if str(path).startswith(prefix)
        }

    def details(self, folder: str) -> dict[str, dict[str, Any]]:
        """Returns relative path and the file system's own details of every file below a folder."""
        prefix = self._root + "/"
        try:
            with _reading(folder):
                found = self._fs.find(self.path(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {str(path).removeprefix(prefix): dict(info) for path, info in found.items()}

    def _find_local(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for folder, _, names in self._walk():
            for name in names:
                path = os.path.join(folder, name)
                try:
                    found[os.path.relpath(path, self._root)] = os.lstat(path).st_size
                except FileNotFoundError:
                    continue  # A writer replaced it meanwhile.
        return found

    def write(self, rel: str, chunks: Iterable[Buffer]) -> None:
        """Creates or replaces a file; a reader sees the old or the new bytes.

        Raises:
            StoreUnwritableError: If the file system refuses or is full.
        """
        with self._writing():
            if self.local:
                self._write_local(Path(self.path(rel)), chunks)
                return
            # Object stores publish an object only when its upload is complete.
            on_step("put")
            with self._fs.open(self.path(rel), "wb") as handle:
                for chunk in chunks:
                    handle.write(chunk)

    def _write_local(self, path: Path, chunks: Iterable[Buffer]) -> None:
        _make_folder(path.parent)
        temporary = path.parent / f".tmp-{uuid.uuid4().hex}"
        on_step("create")
        try:
            with open(temporary, "xb", buffering=0) as handle:
                for chunk in chunks:
                    rest = memoryview(chunk)
                    while rest:
                        on_step("write")
                        rest = rest[handle.write(rest) :]
                on_step("sync")
                os.fsync(handle.fileno())
            on_step("rename")
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        # Without this the rename itself may be lost when the machine stops.
        on_step("sync folder")
        _sync_folder(path.parent)

    def remove(self, rel: str) -> None:
        """Deletes a file if it is there."""
        with self._writing():
            on_step("remove")
            try:
                self._fs.rm_file(self.path(rel))
            except _MISSING:
                return

    def remove_all(self, rels: Sequence[str]) -> None:
        """Deletes many files, on object stores in few requests; missing ones are passed over."""
        if self.local:
            for rel in rels:
                self.remove(rel)
            return
        with self._writing():
            on_step("remove")
            try:
                self._fs.rm([self.path(rel) for rel in rels])
            except _MISSING:
                for rel in rels:
                    self.remove(rel)

    def find_folders(self) -> list[str]:
        """Returns every local folder below the root; object stores have none."""
        if not self.local:
            return []
        return [
            os.path.relpath(os.path.join(folder, name), self._root)
            for folder, names, _ in self._walk()
            for name in names
        ]

    def _walk(self) -> Iterator[tuple[str, list[str], list[str]]]:
        """Walks the local tree; a folder that cannot be read is an error, not an empty one."""

        def failed(error: OSError) -> None:
            if not isinstance(error, _MISSING):
                raise error

        with self._writing():
            for folder, folders, names in os.walk(self._root, onerror=failed):
                # The root of a volume has it, readable by root alone, and it is nobody's data.
                folders[:] = [name for name in folders if name != "lost+found"]
                yield folder, folders, names

    def sync_folder(self, folder: str) -> None:
        """Makes deletions in a folder last; object stores need no such call."""
        if self.local and os.path.isdir(self.path(folder)):
            with self._writing():
                on_step("sync folder")
                _sync_folder(Path(self.path(folder)))

    def remove_folder(self, folder: str) -> None:
        """Deletes an empty local folder; object stores have none to delete."""
        if self.local:
            with self._writing():
                on_step("remove folder")
                try:
                    os.rmdir(self.path(folder))
                except _MISSING:
                    return
                except OSError as exc:
                    # A new writer of the same user has already begun in it.
                    if exc.errno != errno.ENOTEMPTY:
                        raise

    @contextmanager
    def lock(self, folder: str) -> Iterator[None]:
        """Holds a folder's lock against other writers; on object stores those of this process."""
        if not self.local:
            with _LOCKS[hash(self.path(folder)) % len(_LOCKS)]:
                yield
            return
        path = Path(self.path(folder)) / ".lock"
        handle = -1
        with self._writing():
            while handle < 0:
                _make_folder(path.parent)
                try:
                    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                except FileNotFoundError:
                    continue  # A removal deleted the folder in between.
                fcntl.flock(handle, fcntl.LOCK_EX)
                # A removal may have deleted the file while we waited; its lock protects nothing.
                if not (path.exists() and os.path.samestat(os.fstat(handle), os.stat(path))):
                    os.close(handle)
                    handle = -1
        try:
            yield
        finally:
            os.close(handle)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise StoreUnwritableError(
                f"store '{self.url}' cannot be written: {exc.strerror or exc}. "
                "Check its path, permissions and free space"
            ) from exc


@contextmanager
def _reading(rel: str) -> Iterator[None]:
    try:
        yield
    except _MISSING as exc:
        raise FileNotFoundError(rel) from exc
    except OSError as exc:
        raise DamagedStoreError(rel, f"it cannot be read ({exc.strerror or exc})") from exc


def _fill(handle: FileIO, part: memoryview) -> int:
    """Reads until the buffer is full or the file ends; returns how many bytes there were."""
    done = 0
    # One read call may return less than asked for, above 2 GiB always.
    while done < len(part) and (count := handle.readinto(part[done:])):
        done += count
    return done


def _name(info: dict[str, Any]) -> str:
    return str(info["name"]).rstrip("/").rsplit("/", 1)[-1]


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    if folder.parent != folder:
        _make_folder(folder.parent)
    on_step("make folder")
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
