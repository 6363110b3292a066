"""KV files of quantised rows: bytes, reading, compaction and damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from inferscale_runtime.errors import ConfigError, DamagedStoreError
from inferscale_runtime.packing.rows import PackedKV, channel_exponents, pack
from inferscale_runtime.store.store import NewSegment, Store

EXPONENTS = channel_exponents(torch.randn((9, 2, 2, 1, 4)))


@pytest.fixture
def segment(kit: SimpleNamespace) -> Callable[..., NewSegment]:
    def make(number: int, kind: str = "int8", exponents: torch.Tensor = EXPONENTS) -> NewSegment:
        plain = kit.segment(number)
        return replace(plain, kv=pack(plain.kv, kind, exponents))

    return make


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_is_read_is_what_was_written(
    store: Store, kit: SimpleNamespace, segment: Callable[..., NewSegment], kind: str
) -> None:
    given = [segment(n, kind) for n in range(4)]
    memory = store.commit_user(kit.memory(), {kit.FP: given})
    table = memory.encodings[kit.FP]
    # A commit that leaves few rows alive copies them.
    fewer = replace(
        memory,
        facts=memory.facts[:2],
        embeddings=memory.embeddings[:2],
        encodings={kit.FP: {name: table[name] for name in ("f0",)}},
    )
    memory = store.commit_user(fewer, {})
    assert store.verify() == []
    (found,) = store.read_segments("ana", [memory.encodings[kit.FP]["f0"]])
    assert isinstance(found, PackedKV)
    assert found.shape == given[0].kv.shape
    assert torch.equal(found.rows, given[0].kv.rows)
    assert torch.equal(found.exponents, EXPONENTS)


def test_the_file_is_safetensors(
    store: Store,
    kit: SimpleNamespace,
    segment: Callable[..., NewSegment],
    folder_of: Callable[[str], Path],
) -> None:
    store.commit_user(kit.memory(), {kit.FP: [segment(1)]})
    (path,) = folder_of("ana").glob("kv-*.safetensors")
    tensors = load_file(path)
    assert torch.equal(tensors["exponents"], EXPONENTS)
    assert torch.equal(tensors["kv"], segment(1).kv.rows)
    head = path.read_bytes()[8:]
    entries = json.loads(head[: int.from_bytes(path.read_bytes()[:8], "little")])
    assert entries["__metadata__"]["kv_dtype"] == "int8"


def test_every_damaged_byte_shows(
    store: Store,
    kit: SimpleNamespace,
    segment: Callable[..., NewSegment],
    folder_of: Callable[[str], Path],
) -> None:
    memory = store.commit_user(kit.memory(), {kit.FP: [segment(0)]})
    (path,) = folder_of("ana").glob("kv-*.safetensors")
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        kit.flip(path, at)
        (found,) = store.read_segments("ana", [memory.encodings[kit.FP]["f0"]])
        assert isinstance(found, DamagedStoreError), at
        path.write_bytes(whole)
    path.write_bytes(whole[:-1])
    (found,) = store.read_segments("ana", [memory.encodings[kit.FP]["f0"]])
    assert isinstance(found, DamagedStoreError)


def test_one_file_has_one_table(
    store: Store, kit: SimpleNamespace, segment: Callable[..., NewSegment]
) -> None:
    other = segment(1, exponents=EXPONENTS + 1)
    with pytest.raises(ConfigError, match="differs"):
        store.commit_user(kit.memory(), {kit.FP: [segment(0), other]})
    with pytest.raises(ConfigError, match="differs"):
        store.commit_user(kit.memory(), {kit.FP: [segment(0), kit.segment(1)]})
