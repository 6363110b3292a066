"""The compiled writer against the portable one, over a cache laid out as vLLM's CPU backend does.

The real backend is the subject of the integration tests; here the layout is written down once more,
by torch, with any rotation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_runtime.inject import native
from inferscale_runtime.inject.check import SlabLayout, choose_writer
from inferscale_runtime.inject.fast import FastWriter, split_units
from inferscale_runtime.inject.native import NativeLibrary, build_library
from inferscale_runtime.inject.writer import (
    LayerTarget,
    Placement,
    PortableWriter,
    Unpacking,
    WriterUnavailableError,
)
from inferscale_runtime.packing.rows import channel_exponents, pack

NUM_LAYERS, NUM_HEADS, HEAD_DIM, BLOCK, NUM_BLOCKS = 3, 4, 32, 32, 6
POSITIONS = 500


class Layer:
    """A layer whose cache has the packed layout: keys ``[dim, block]``, then values."""

    kv_cache_dtype = "auto"

    def __init__(self, heads: int, swap_heads: bool = False) -> None:
        self.impl = self
        self.swap_heads = swap_heads
        self.kv_cache = torch.full((NUM_BLOCKS, heads, BLOCK, 2 * HEAD_DIM), -1.0)

    def do_kv_cache_update(
        self,
        layer: Any,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        flat = kv_cache.view(len(kv_cache), kv_cache.shape[1], 2, -1)
        key_part = flat[:, :, 0].view(len(kv_cache), -1, HEAD_DIM, BLOCK)
        value_part = flat[:, :, 1].view(len(kv_cache), -1, BLOCK, HEAD_DIM)
        if self.swap_heads:
            keys, values = keys.flip(1), values.flip(1)
        key_part[slots // BLOCK, :, :, slots % BLOCK] = keys
        value_part[slots // BLOCK, :, slots % BLOCK] = values


class Rotary:
    """Rotates the first ``rotary_dim`` elements; products rounded one by one."""

    is_neox_style = True

    def __init__(self, rotary_dim: int) -> None:
        angles = torch.rand(POSITIONS, rotary_dim // 2, generator=torch.Generator().manual_seed(3))
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], 1)

    def __call__(
        self, positions: torch.Tensor, keys: torch.Tensor, _: None
    ) -> tuple[torch.Tensor, None]:
        half = self.cos_sin_cache.shape[1] // 2
        heads = keys.unflatten(1, (-1, HEAD_DIM))
        cosine, sine = self.cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)
        x, y = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
        heads[..., :half] = x * cosine - y * sine
        heads[..., half : 2 * half] = y * cosine + x * sine
        return keys, None


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    return NativeLibrary(build_library(tmp_path_factory.mktemp("native")))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def slab_of(seed: int, rows: int = 90) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, NUM_LAYERS, 2, NUM_HEADS, HEAD_DIM), generator=generator)


def targets(heads: int, groups: int = 1) -> list[LayerTarget]:
    return [LayerTarget(n, Layer(heads), n % groups) for n in range(NUM_LAYERS)]


def written(writer: Any, layers: list[LayerTarget], placements: list[Placement]) -> torch.Tensor:
    for layer in layers:
        layer.module.kv_cache.fill_(-1.0)
    writer.write(layers, placements)
    return torch.stack([layer.module.kv_cache for layer in layers])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    first=st.integers(0, BLOCK * 3),
    count=st.integers(1, 80),
    rotary_dim=st.sampled_from([16, 32]),
    heads=st.sampled_from([slice(0, 4), slice(1, 3), slice(3, 4)]),
)
def test_equals_the_portable_writer(
    library: NativeLibrary, seed: int, first: int, count: int, rotary_dim: int, heads: slice
) -> None:
    slab, rotary = slab_of(seed), Rotary(rotary_dim)
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(NUM_BLOCKS, generator=generator)
    positions = torch.arange(first, first + count)
    slots = blocks[positions // BLOCK] * BLOCK + positions % BLOCK
    placement = Placement(torch.randint(0, 90, (count,), generator=generator), positions, slots)
    layers = targets(heads.stop - heads.start)
    expected = written(PortableWriter(slab, heads, rotary), layers, [placement])
    found = written(FastWriter(slab, heads, rotary, library, 0), layers, [placement])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("heads", [slice(0, 4), slice(1, 3)])
def test_quantised_rows(library: NativeLibrary, kind: str, heads: slice, threads: int) -> None:
    slab, rotary = slab_of(2), Rotary(16)
    slab[:, :, 0] *= torch.tensor([0.01, 1, 50, 3]).repeat(HEAD_DIM // 4)
    packed = pack(slab, kind, channel_exponents(slab))
    unpacking = Unpacking(packed.shape, packed.exponents, torch.float32)
    slots = torch.randperm(NUM_BLOCKS * BLOCK, generator=torch.Generator().manual_seed(1))[:60]
    slots[:40] = torch.arange(40) + 64
    slots[40:] = torch.arange(140, 160)
    placement = Placement(torch.arange(60).flip(0), torch.arange(60) + 7, slots)
    layers = targets(heads.stop - heads.start)
    plain = packed.unpack(torch.float32)
    expected = written(PortableWriter(plain, heads, rotary), layers, [placement])
    for writer in (
        PortableWriter(packed.rows, heads, rotary, unpacking),
        FastWriter(packed.rows, heads, rotary, library, 0, unpacking),
    ):
        assert torch.equal(written(writer, layers, [placement]), expected)
    # The bytes are those of the quantised rows and not the plain ones by accident.
    assert not torch.equal(
        expected, written(PortableWriter(slab, heads, rotary), layers, [placement])
    )


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_chosen_for_quantised_rows(library: NativeLibrary, kind: str) -> None:
    packed = pack(slab_of(2), kind, channel_exponents(slab_of(2)))
    choice = choose_writer("auto", targets(NUM_HEADS), Rotary(HEAD_DIM), layout(kv_dtype=kind))
    assert (choice.name, choice.reason) == ("native", "")
    assert isinstance(choice.open(packed.rows, packed.exponents), FastWriter)


def test_scattered_slots_groups_and_threads(library: NativeLibrary, threads: int) -> None:
    slab, rotary = slab_of(5), Rotary(HEAD_DIM)
    slots = torch.randperm(NUM_BLOCKS * BLOCK, generator=torch.Generator().manual_seed(1))[:90]
    whole = Placement(torch.arange(90), torch.arange(90) + 7, slots)
    window = Placement(torch.arange(20), torch.arange(20), torch.arange(64, 84))
    nothing = Placement(*(torch.empty(0, dtype=torch.int64) for _ in range(3)))
    layers = targets(NUM_HEADS, groups=2)
    writers = [
        PortableWriter(slab, slice(0, 4), rotary),
        FastWriter(slab, slice(0, 4), rotary, library, 0),
    ]
    for placements in ([whole, window], [window, whole], [whole, nothing]):
        expected, found = (written(writer, layers, placements) for writer in writers)
        assert torch.equal(found, expected)
        assert (found != -1).any()


@pytest.mark.parametrize(
    ("row", "position", "slot"),
    [(90, 0, 0), (-1, 0, 0), (0, POSITIONS, 0), (0, 0, NUM_BLOCKS * BLOCK), (0, 0, -1)],
)
def test_nothing_outside_is_touched(
    library: NativeLibrary, row: int, position: int, slot: int
) -> None:
    writer = FastWriter(slab_of(1), slice(0, 4), Rotary(HEAD_DIM), library, 0)
    placement = Placement(torch.tensor([row]), torch.tensor([position]), torch.tensor([slot]))
    with pytest.raises(IndexError, match="out of range"):
        writer.write(targets(NUM_HEADS), [placement])


def test_units_end_at_jumps_and_lines() -> None:
    slots = torch.tensor([14, 15, 16, 17, 40, 41, 39, 38])
    assert split_units(slots).tolist() == [0, 2, 4, 6, 7, 8]
    assert split_units(torch.tensor([3])).tolist() == [0, 1]


def layout(dtype: torch.dtype = torch.float32, kv_dtype: str = "auto") -> SlabLayout:
    return SlabLayout(NUM_LAYERS, NUM_HEADS, HEAD_DIM, dtype, slice(0, NUM_HEADS), kv_dtype)


def test_chosen_when_the_bytes_are_the_same(library: NativeLibrary) -> None:
    layers = targets(NUM_HEADS)
    rotary = Rotary(HEAD_DIM)
    choice = choose_writer("auto", layers, rotary, layout(), build_library)
    assert (choice.name, choice.reason) == ("native", "")
    assert all((layer.module.kv_cache == -1).all() for layer in layers), "live caches are left"
    assert isinstance(choice.open(slab_of(1), None), FastWriter)


def test_portable_when_asked_for() -> None:
    def build() -> Path:
        raise AssertionError("built for nothing")

    choice = choose_writer("portable", targets(NUM_HEADS), Rotary(HEAD_DIM), layout(), build)
    assert choice.name == "portable"
    assert isinstance(choice.open(slab_of(1), None), PortableWriter)


def test_portable_when_the_bytes_differ() -> None:
    layers = targets(NUM_HEADS)
    layers[-1].module.swap_heads = True
    choice = choose_writer("auto", layers, Rotary(HEAD_DIM), layout())
    assert choice.name == "portable"
    assert "largest difference" in choice.reason


def test_portable_when_the_rotation_differs() -> None:
    rotary = Rotary(HEAD_DIM)

    class Scaled(Rotary):
        def __call__(self, positions: torch.Tensor, keys: torch.Tensor, _: None) -> Any:
            return rotary(positions, keys * 1.01, None)

    choice = choose_writer("auto", targets(NUM_HEADS), Scaled(HEAD_DIM), layout())
    assert "largest difference" in choice.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layers, rotary: setattr(rotary, "is_neox_style", False), "rotate-half"),
        (
            lambda layers, rotary: setattr(
                layers[1].module, "kv_cache", layers[1].module.kv_cache.to(torch.bfloat16)
            ),
            "layer 1 is torch.bfloat16",
        ),
        (
            lambda layers, rotary: setattr(
                layers[0].module, "kv_cache", layers[0].module.kv_cache[..., ::2]
            ),
            "strides",
        ),
        (
            lambda layers, rotary: setattr(
                rotary, "cos_sin_cache", rotary.cos_sin_cache.to(torch.float64)
            ),
            "angles",
        ),
    ],
)
def test_portable_for_unknown_layouts(change: Any, reason: str) -> None:
    layers, rotary = targets(NUM_HEADS), Rotary(HEAD_DIM)
    change(layers, rotary)
    choice = choose_writer("auto", layers, rotary, layout())
    assert choice.name == "portable"
    assert reason in choice.reason


def test_portable_when_the_proof_fails_in_any_way() -> None:
    class Silent(Rotary):
        def __call__(self, positions: torch.Tensor, keys: torch.Tensor, _: None) -> Any:
            raise RuntimeError("no kernel")

    choice = choose_writer("auto", targets(NUM_HEADS), Silent(HEAD_DIM), layout())
    assert (choice.name, choice.reason) == ("portable", "RuntimeError: no kernel")


def test_portable_for_other_element_types() -> None:
    choice = choose_writer("auto", targets(NUM_HEADS), Rotary(HEAD_DIM), layout(torch.bfloat16))
    assert "float32 only" in choice.reason


def test_a_compiler_that_fails_is_a_reason(tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'no such luck' >&2\nexit 3\n"
    )
    compiler.chmod(0o700)
    with pytest.raises(WriterUnavailableError, match=r"status 3: no such luck"):
        build_library(tmp_path / "cache", str(compiler))
    assert not list((tmp_path / "cache").iterdir()), "nothing half-built is left"


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(WriterUnavailableError, match=r"no C\+\+ compiler"):
        build_library(tmp_path / "cache")


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(WriterUnavailableError, match="others may write"):
        build_library(folder)


def test_built_once(tmp_path: Path) -> None:
    first = build_library(tmp_path / "cache")
    stamp = os.stat(first).st_mtime_ns
    assert build_library(tmp_path / "cache") == first
    assert os.stat(first).st_mtime_ns == stamp


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "inject.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(WriterUnavailableError, match="cannot be loaded"):
        NativeLibrary(broken)


def test_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / "inferscale"
