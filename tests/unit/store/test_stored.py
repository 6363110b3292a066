"""A segment is read into memory that is there, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.store import files
from inferscale_runtime.store.store import Store
from inferscale_runtime.store.stored import StoredSegment
from inferscale_runtime.store.tensors import byte_view


@pytest.fixture(params=["folder", "memory"])
def either(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Store:
    """A folder, and what answers as object storage does."""
    if request.param == "folder":
        return store
    return Store.open(f"memory://{tmp_path.name}", create=True)


def sources(store: Store, kit: SimpleNamespace) -> list[StoredSegment]:
    memory = kit.filled(store)
    found = store.find_segments("ana", list(memory.encodings[kit.FP].values()))
    assert all(isinstance(source, StoredSegment) for source in found)
    return [source for source in found if isinstance(source, StoredSegment)]


@pytest.mark.parametrize("first", [1, 2])
def test_pieces_hold_what_was_written(either: Store, kit: SimpleNamespace, first: int) -> None:
    for number, source in enumerate(sources(either, kit)):
        written = kit.segment(number).kv
        pieces = [torch.zeros_like(written[:first]), torch.zeros_like(written[first:])]
        source.read_into([byte_view(piece) for piece in pieces])
        assert torch.equal(torch.cat(pieces), written)
        assert source.nbytes == written.nbytes
        assert torch.equal(source.kv(), written)


def test_changed_bytes_are_an_error_whichever_way_they_are_read(
    store: Store, kit: SimpleNamespace, folder_of: Callable[[str], Path]
) -> None:
    *whole, last = sources(store, kit)
    (path,) = folder_of("ana").glob("kv*")
    kit.flip(path, path.stat().st_size - 1)
    room = memoryview(bytearray(last.nbytes))
    for read in (last.kv, last.data, lambda: last.read_into([room])):
        with pytest.raises(DamagedStoreError, match="crc32 of fact 'f3'"):
            read()
    assert [source.kv() is not None for source in whole] == [True] * 3
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedStoreError, match="crc32 of fact 'f3'"):
        last.read_into([room])
    path.unlink()
    with pytest.raises(DamagedStoreError, match="it is missing"):
        last.read_into([room])


def test_a_segment_without_tokens_is_damaged(either: Store, kit: SimpleNamespace) -> None:
    source = sources(either, kit)[0]
    empty = replace(source.segment, token_ids=(), crc32=0)
    with pytest.raises(DamagedStoreError):
        replace(source, segment=empty).data()
    (found,) = either.find_segments("ana", [empty])
    assert isinstance(found, DamagedStoreError)


def test_a_file_is_opened_once_while_files_are_held(
    store: Store, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = [source.segment for source in sources(store, kit)]
    opened: list[files.FileIO] = []

    class Counted(files.FileIO):
        def __init__(self, path: str) -> None:
            super().__init__(path)
            opened.append(self)

    monkeypatch.setattr(files, "FileIO", Counted)

    def read() -> list[bytes]:
        found = store.find_segments("ana", segments)
        return [bytes(s.data()) for s in found if isinstance(s, StoredSegment)]

    with store.holding_files():
        first = read()
        assert len(store.read_segments("ana", segments)) == len(first) == 4
        assert read() == first
        assert len(opened) == 1
        assert not opened[0].closed
    assert opened[0].closed
    assert read() == first
    assert len(opened) > 4
    assert all(handle.closed for handle in opened)


def test_no_more_files_are_held_than_a_process_may_open(
    store: Store, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = [source.segment for source in sources(store, kit)]
    monkeypatch.setattr(files, "_MOST_HELD", 0)
    with store.holding_files():
        found = store.read_segments("ana", segments)
    assert all(not isinstance(kv, DamagedStoreError) for kv in found)


def test_a_file_that_is_replaced_while_it_is_held_is_read_as_it_was(
    store: Store, kit: SimpleNamespace, folder_of: Callable[[str], Path]
) -> None:
    segments = [source.segment for source in sources(store, kit)]
    (path,) = folder_of("ana").glob("kv*")
    with store.holding_files():
        found = store.find_segments("ana", segments)
        path.unlink()
        assert all(isinstance(s, StoredSegment) and s.kv() is not None for s in found)
    assert isinstance(store.read_segments("ana", segments)[0], DamagedStoreError)
