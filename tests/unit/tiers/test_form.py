"""Store and arena in the same form and in different ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from inferscale_runtime.packing.rows import PackedKV, channel_exponents, pack
from inferscale_runtime.store.kvfile import Layout
from inferscale_runtime.store.tensors import layout_of
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.device_arena import DeviceArena
from inferscale_runtime.tiers.form import SlabForm
from inferscale_runtime.tiers.slab import (
    SlabShape,
    create_run_files,
    load_exponents,
    map_leases,
    map_slab,
    map_stamps,
)

PREAMBLE = torch.randn((6, 2, 2, 4, 16), generator=torch.Generator().manual_seed(1))
FACT = torch.randn((5, 2, 2, 4, 16), generator=torch.Generator().manual_seed(2))


def arena_of(folder: Path, kv_dtype: str) -> tuple[Arena, SlabShape]:
    shape = SlabShape(20, 2, 4, 16, "float32", kv_dtype)
    create_run_files(folder, shape)
    slab, leases, stamps = map_slab(folder, shape), map_leases(folder), map_stamps(folder, shape)
    arena = Arena(slab, leases, stamps=stamps, form=SlabForm(shape, folder))
    assert arena.put("preamble", PREAMBLE, pin=True)
    return arena, shape


def test_quantised_rows_stay_as_they_are_on_every_tier(tmp_path: Path) -> None:
    arena, shape = arena_of(tmp_path, "int8")
    exponents = load_exponents(tmp_path, shape)
    assert exponents is not None
    assert torch.equal(exponents, channel_exponents(PREAMBLE))
    packed = pack(FACT, "int8", exponents)
    assert arena.put("fact", packed)
    lease = arena.acquire(["fact"])
    assert lease is not None
    ((first, count),) = lease.runs
    slab = map_slab(tmp_path, shape)
    assert torch.equal(slab[first : first + count], packed.rows)
    assert arena.row_bytes == packed.shape.row_bytes
    heads = slice(2, 4)
    stamps = map_stamps(tmp_path, shape)
    device = DeviceArena(slab, stamps, heads, 1 << 20, torch.device("cpu"))
    for _ in range(2):
        assert torch.equal(device.fetch(lease.runs), packed.rows[:, heads])
    assert device.figures.hits == 1


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_plain_store_in_a_quantised_arena(tmp_path: Path, kind: str) -> None:
    arena, shape = arena_of(tmp_path, kind)
    exponents = load_exponents(tmp_path, shape)
    assert exponents is not None
    assert arena.put("fact", FACT)
    lease = arena.acquire(["fact"])
    assert lease is not None
    ((first, count),) = lease.runs
    expected = pack(FACT, kind, exponents).rows
    assert torch.equal(map_slab(tmp_path, shape)[first : first + count], expected)


def test_other_exponents_and_other_kinds_are_quantised_again(tmp_path: Path) -> None:
    arena, shape = arena_of(tmp_path, "int8")
    exponents = load_exponents(tmp_path, shape)
    assert exponents is not None
    for key, packed in (
        ("shifted", pack(FACT, "int8", exponents + 1)),
        ("other", pack(FACT, "fp8", exponents)),
    ):
        assert arena.put(key, packed)
        lease = arena.acquire([key])
        assert lease is not None
        ((first, count),) = lease.runs
        expected = pack(packed.unpack(torch.float32), "int8", exponents).rows
        assert torch.equal(map_slab(tmp_path, shape)[first : first + count], expected)


def test_a_quantised_store_in_a_plain_arena(tmp_path: Path) -> None:
    arena, shape = arena_of(tmp_path, "auto")
    packed = pack(FACT, "fp8", channel_exponents(PREAMBLE))
    assert arena.put("fact", packed)
    lease = arena.acquire(["fact"])
    assert lease is not None
    ((first, count),) = lease.runs
    found = map_slab(tmp_path, shape)[first : first + count]
    assert torch.equal(found, packed.unpack(torch.float32))
    assert load_exponents(tmp_path, shape) is None


def layout(kind: str, kv: torch.Tensor | PackedKV = FACT) -> Layout:
    found = layout_of([kv], [5])
    assert found.dtype == kind
    return found


def test_bytes_are_taken_as_they_are_only_where_they_mean_the_same(tmp_path: Path) -> None:
    folders = {kind: tmp_path / kind for kind in ("auto", "int8", "fp8")}
    for folder in folders.values():
        folder.mkdir()
    arenas = {kind: arena_of(folder, kind)[0] for kind, folder in folders.items()}
    exponents = channel_exponents(PREAMBLE)
    others = exponents.clone()
    others[0, 0, 0] += 1
    stored = {
        "auto": layout("F32"),
        "int8": layout("int8", pack(FACT, "int8", exponents)),
        "fp8": layout("fp8", pack(FACT, "fp8", exponents)),
        "other exponents": layout("int8", pack(FACT, "int8", others)),
        "other dtype": layout("F16", FACT.half()),
        "other heads": layout("F32", FACT[:, :, :, :2].contiguous()),
        "other layers": layout("F32", FACT[:, :1].contiguous()),
    }
    taken = {(a, s) for a in arenas for s in stored if arenas[a].takes(stored[s])}
    assert taken == {(kind, kind) for kind in arenas}


def test_nothing_is_left_of_a_segment_that_could_not_be_read(tmp_path: Path) -> None:
    arena, shape = arena_of(tmp_path, "auto")
    used = arena.used_rows

    def fails(runs: Sequence[torch.Tensor]) -> None:
        for run in runs:
            run.fill_(7)
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        arena.fill("fact", 5, fails)
    assert arena.resident(["fact"]) == set()
    assert arena.used_rows == used
    assert not (map_slab(tmp_path, shape) == 7).any()
    assert arena.put("fact", FACT), "the key is free again"
