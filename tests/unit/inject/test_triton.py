"""The Triton kernel, run by Triton's interpreter on the CPU, against the portable writer.

The caches are laid out as vLLM 0.32 gives them to its GPU backends: ``[blocks, heads, block,
2 * head_dim]`` with the strides of each physical order, all layers in one allocation or each its
own.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter

from inferscale_runtime.inject.check import SlabLayout, choose_writer
from inferscale_runtime.inject.gpu import TritonWriter, check_triton_layout
from inferscale_runtime.inject.triton_kernel import load_kernel
from inferscale_runtime.inject.writer import (
    LayerTarget,
    Placement,
    PortableWriter,
    Unpacking,
    WriterUnavailableError,
)
from inferscale_runtime.packing.rows import channel_exponents, pack

BLOCKS, LAYERS, POSITIONS, ROWS = 5, 2, 300, 70
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""Physical orders of [layer, block, head, slot, content] in vLLM 0.32 (``kv_cache_layout.py``)."""


class Layer:
    """A layer that writes as vLLM's FlashAttention backend does."""

    def __init__(self, cache: torch.Tensor, scale: float) -> None:
        self.impl = self
        self.kv_cache = cache
        self.kv_cache_dtype = "fp8" if cache.element_size() == 1 else "auto"
        self._k_scale, self._v_scale = torch.tensor(scale), torch.tensor(scale / 2)

    def do_kv_cache_update(
        self, layer: Any, keys: Any, values: Any, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        parts = kv_cache.transpose(1, 2).split(keys.shape[2], dim=-1)
        block = kv_cache.shape[2]
        for part, rows, scale in zip(
            parts, (keys, values), (layer._k_scale, layer._v_scale), strict=True
        ):
            if kv_cache.element_size() == 1:
                small = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                rows = small.view(torch.uint8)
            part[slots // block, slots % block] = rows


class Rotary:
    """Products rounded to the model's type one by one, as vLLM's own kernel and torch do."""

    def __init__(self, head_dim: int, rotary_dim: int, neox: bool, dtype: torch.dtype) -> None:
        self.head_dim, self.is_neox_style = head_dim, neox
        angle = torch.rand(POSITIONS, rotary_dim // 2, generator=torch.Generator().manual_seed(3))
        self.cos_sin_cache = torch.cat([angle.cos(), angle.sin()], 1).to(dtype)

    def __call__(self, positions: Any, keys: torch.Tensor, _: None) -> tuple[torch.Tensor, None]:
        heads = keys.clone().unflatten(1, (-1, self.head_dim))
        cosine, sine = self.cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)
        rotary_dim = self.cos_sin_cache.shape[1]
        turned = heads[..., :rotary_dim]
        if self.is_neox_style:
            x, y = (part.clone() for part in turned.chunk(2, -1))
            turned[...] = torch.cat([x * cosine - y * sine, y * cosine + x * sine], -1)
        else:
            x, y = turned[..., ::2].clone(), turned[..., 1::2].clone()
            turned[..., ::2], turned[..., 1::2] = x * cosine - y * sine, y * cosine + x * sine
        return heads.flatten(1), None


def caches(
    order: str, heads: int, block: int, head_dim: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """One cache a layer; layers of an allocation of their own where the order allows it."""
    sizes = (LAYERS, BLOCKS, heads, block, 2 * head_dim)
    permutation = ORDERS[order]
    empty = 7 if dtype == torch.uint8 else -7.0
    if permutation[0] == 0:
        shape = [sizes[axis] for axis in permutation[1:]]
        found = [torch.full(shape, empty, dtype=dtype) for _ in range(LAYERS)]
        inverse = [permutation[1:].index(axis) for axis in (1, 2, 3, 4)]
        return [cache.permute(inverse) for cache in found]
    whole = torch.full([sizes[axis] for axis in permutation], empty, dtype=dtype)
    return list(whole.permute([permutation.index(axis) for axis in range(5)]))


def targets(found: list[torch.Tensor], groups: int = 1) -> list[LayerTarget]:
    return [LayerTarget(n, Layer(c, 0.5 + n), n % groups) for n, c in enumerate(found)]


def slab_of(heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(heads * head_dim)
    slab = torch.randn((ROWS, LAYERS, 2, heads, head_dim), generator=generator)
    slab[:, :, 0] *= torch.tensor([0.02, 1.0, 9.0, 2.0]).repeat(head_dim // 4)
    return slab.to(dtype)


def placement(block: int, count: int = 37) -> Placement:
    generator = torch.Generator().manual_seed(block)
    return Placement(
        torch.randint(0, ROWS, (count,), generator=generator),
        torch.randint(0, POSITIONS, (count,), generator=generator),
        torch.randperm(BLOCKS * block, generator=generator)[:count],
    )


TORCH_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
}


def convert(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
    """Triton 3.9's interpreter rounds bfloat16 and fp8 wrongly (no ties, no carry); this does not.

    Values and result are bit patterns of the given and the wanted type.
    """
    bits = torch.from_numpy(np.ascontiguousarray(values))
    found = bits.view(TORCH_TYPES[given.name]).to(TORCH_TYPES[wanted.name])
    size = found.element_size()
    raw = found.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]).numpy()
    return raw.view(f"uint{8 * size}").reshape(values.shape)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield load_kernel(interpret=True)


def written(writer: Any, layers: list[LayerTarget], places: list[Placement]) -> list[torch.Tensor]:
    for layer in layers:
        layer.module.kv_cache.fill_(7 if layer.module.kv_cache.dtype == torch.uint8 else -7.0)
    writer.write(layers, places)
    return [layer.module.kv_cache.clone() for layer in layers]


def assert_equal(kernel: Any, case: dict[str, Any]) -> None:
    dtype, head_dim, block = case["dtype"], case["head_dim"], case["block"]
    heads: slice = case["heads"]
    cache_type = torch.uint8 if case["fp8"] else dtype
    layers = targets(caches(case["order"], heads.stop - heads.start, block, head_dim, cache_type))
    rotary = Rotary(head_dim, case["rotary_dim"], case["neox"], dtype)
    slab, unpacking = slab_of(4, head_dim, dtype), None
    if case["kind"] != "auto":
        packed = pack(slab, case["kind"], channel_exponents(slab))
        slab = packed.rows
        unpacking = Unpacking(packed.shape, packed.exponents, dtype)
    places = [placement(block)]
    check_triton_layout(layers, rotary, dtype)
    rounding = 0 if dtype == torch.float32 else 3
    expected = written(PortableWriter(slab, heads, rotary, unpacking), layers, places)
    writer = TritonWriter(slab, heads, rotary, kernel, rounding, dtype, unpacking)
    for a, b in zip(written(writer, layers, places), expected, strict=True):
        # Bits: fp8 has more than one NaN, and -0 is not 0.
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


BASE: dict[str, Any] = {
    "order": "LBNHC",
    "heads": slice(0, 4),
    "block": 16,
    "head_dim": 64,
    "rotary_dim": 64,
    "neox": True,
    "dtype": torch.bfloat16,
    "kind": "auto",
    "fp8": False,
}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    "change",
    [
        *({"order": order} for order in ORDERS),
        {"order": "LBHNC", "block": 32, "dtype": F32},
        {"block": 128, "head_dim": 128, "rotary_dim": 128, "dtype": F16},
        {"head_dim": 96, "rotary_dim": 96},
        {"head_dim": 80, "rotary_dim": 80},
        {"head_dim": 80, "rotary_dim": 32, "neox": False, "dtype": F32},
        {"head_dim": 128, "rotary_dim": 64},
        {"neox": False},
        {"heads": slice(2, 4)},
        {"heads": slice(3, 4), "kind": "int8"},
        {"kind": "int8"},
        {"kind": "fp8"},
        {"kind": "int8", "dtype": F32, "head_dim": 96, "rotary_dim": 48},
        {"kind": "fp8", "dtype": F16, "neox": False},
        {"fp8": True},
        {"fp8": True, "head_dim": 80, "rotary_dim": 32, "order": "BLNHC"},
        {"fp8": True, "kind": "int8", "heads": slice(1, 3)},
        {"fp8": True, "kind": "fp8", "head_dim": 128, "rotary_dim": 128},
    ],
    ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items()),
)
def test_equals_the_portable_writer(kernel: Any, change: dict[str, Any]) -> None:
    assert_equal(kernel, BASE | change)


def test_groups_with_places_of_their_own(kernel: Any) -> None:
    layers = targets(caches("LBHNC", 4, 16, 64, F32), groups=2)
    slab, rotary = slab_of(4, 64, F32), Rotary(64, 64, True, F32)
    nothing = Placement(*(torch.empty(0, dtype=torch.int64) for _ in range(3)))
    writers = [
        PortableWriter(slab, slice(0, 4), rotary),
        TritonWriter(slab, slice(0, 4), rotary, kernel, 0, F32),
    ]
    for places in ([placement(16), placement(16, 3)], [placement(16), nothing]):
        expected, found = (written(writer, layers, places) for writer in writers)
        assert all(map(torch.equal, found, expected))


def layout(dtype: torch.dtype = F32, kv_dtype: str = "auto") -> SlabLayout:
    return SlabLayout(LAYERS, 4, 64, dtype, slice(0, 4), kv_dtype)


@pytest.mark.parametrize(("dtype", "kind"), [(F32, "auto"), (BF16, "auto"), (BF16, "int8")])
def test_chosen_when_proved(kernel: Any, dtype: torch.dtype, kind: str) -> None:
    layers = targets(caches("LBNHC", 4, 16, 64, dtype))
    rotary = Rotary(64, 64, True, dtype)
    choice = choose_writer("auto", layers, rotary, layout(dtype, kind), kernel=kernel)
    assert (choice.name, choice.reason) == ("triton", "")
    assert all((layer.module.kv_cache == -7).all() for layer in layers), "live caches are left"
    slab = slab_of(4, 64, dtype)
    packed = pack(slab, kind, channel_exponents(slab)) if kind != "auto" else None
    writer = choice.open(*((packed.rows, packed.exponents) if packed else (slab, None)))
    assert isinstance(writer, TritonWriter)


def test_portable_when_a_layer_keeps_values_first(kernel: Any) -> None:
    layers = targets(caches("LBNHC", 4, 16, 64, F32))
    write = layers[1].module.do_kv_cache_update
    layers[1].module.do_kv_cache_update = lambda layer, keys, values, *rest: write(
        layer, values, keys, *rest
    )
    choice = choose_writer("auto", layers, Rotary(64, 64, True, F32), layout(), kernel=kernel)
    assert choice.name == "portable"
    assert "largest difference" in choice.reason


@pytest.mark.parametrize(
    ("order", "change", "reason"),
    [
        ("LBHNC", lambda m, r: setattr(m, "kv_cache", m.kv_cache[:, :, :, ::2]), "the shape"),
        ("BLNHC", lambda m, r: setattr(m, "kv_cache", m.kv_cache.clone()), "strides"),
        ("LBHNC", lambda m, r: setattr(m, "kv_cache", m.kv_cache.half()), "torch.float16"),
        ("LBHNC", lambda m, r: delattr(r, "cos_sin_cache"), "no table of angles"),
    ],
)
def test_portable_for_unknown_layouts(kernel: Any, order: str, change: Any, reason: str) -> None:
    found = caches(order, 4, 16, 64, F32)
    layers, rotary = targets(found), Rotary(64, 64, True, F32)
    change(layers[1].module, rotary)
    choice = choose_writer("auto", layers, rotary, layout(), kernel=kernel)
    assert choice.name == "portable"
    assert reason in choice.reason


def test_an_fp8_cache_of_another_kind_is_refused() -> None:
    layers = targets(caches("LBNHC", 4, 16, 64, torch.uint8))
    layers[1].module.kv_cache_dtype = "fp8_e5m2"
    with pytest.raises(WriterUnavailableError, match="fp8_e5m2"):
        check_triton_layout(layers, Rotary(64, 64, True, BF16), BF16)


def test_scales_that_come_later_are_refused() -> None:
    layers = targets(caches("LBNHC", 4, 16, 64, torch.uint8))
    layers[0].module.calculate_kv_scales = True
    with pytest.raises(WriterUnavailableError, match="scales later"):
        check_triton_layout(layers, Rotary(64, 64, True, BF16), BF16)


def test_unaligned_layers_are_refused() -> None:
    found = caches("LBNHC", 4, 16, 64, F32)
    memory = torch.empty(found[0].numel() + 4)
    found[1] = memory[4:].as_strided(found[0].shape, found[0].stride())
    if ctypes.c_int64(found[1].data_ptr() - found[0].data_ptr()).value % 64 == 0:
        found[1] = memory[8:].as_strided(found[0].shape, found[0].stride())
    with pytest.raises(WriterUnavailableError, match="not aligned"):
        check_triton_layout(targets(found), Rotary(64, 64, True, F32), F32)


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_compiles_for_a_gpu_with_whole_accesses(kind: str) -> None:
    kernel = load_kernel()
    names = kernel.arg_names
    packed = kind != "auto"
    constants = {
        "HEAD_DIM": 128, "ROTARY_DIM": 128, "HALF": 64, "PASSED": 1, "WIDTH": 128, "NEOX": True,
        "PACKED": packed, "ROUNDING": 3, "MODEL_TYPE": tl.bfloat16, "FP8_CACHE": False,
        "LIMIT": 448.0, "BLOCK": 16,
    }  # fmt: skip
    rows = ("*i8", "*bf16", "*fp32") if packed else ("*bf16",) * 3
    pointers = (*rows, "*bf16", "*bf16", "*i64", "*i64", "*i64")
    signature = dict.fromkeys(names, "i32") | dict(zip(names, pointers, strict=False))
    signature |= dict.fromkeys(constants, "constexpr")
    divisible = [n for n, name in enumerate(names) if "stride" in name or "*" in signature[name]]
    divisible += [names.index("value_offset"), names.index("scale_offset")]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(n,): [["tt.divisibility", 16]] for n in divisible},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    # Rows and caches go in pieces of 16 bytes (8 for codes): anything less wastes bandwidth.
    assert "st.global.v4.b32" in text
    assert not re.search(r"st\.global\.(b16|b32|b8)", text)
    assert not re.search(r"ld\.global\.b8", text)
