"""The Triton kernel: gather, unpack, rotate and scatter for all layers in one launch.

Imported only where triton is installed. One program takes ``BLOCK`` tokens of one layer, loads
their cosines and sines once and goes over the heads, so that every byte of the rows is read once
and every byte of the cache written once. Addresses of layers are given as distances from the first
layer's cache: vLLM may allocate layers together or one by one.

``jit`` is applied by ``load_kernel`` and not here, because triton decides at that moment whether
the kernel is compiled or interpreted.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ROUNDINGS = (0, 1, 2, 3)
"""How ``a*b + c*d`` of the rotation is rounded: each product in float32 (0), the first (1) or the
second (2) not at all, because it is fused, or each product to the model's type (3)."""
BLOCK = 16
FP8_MAX = 448.0

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def load_kernel(interpret: bool = False) -> Any:
    """The kernel, to be launched as ``kernel[grid](...)``.

    Args:
        interpret: Run it in Python on CPU tensors; for tests.
    """
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpret
        return triton.jit(_write_rows)


def _write_rows(  # type: ignore[no-untyped-def]
    rows_ptr,  # the slab, elements of its type (codes of quantised rows)
    scales_ptr,  # the same memory as bfloat16; quantised rows only
    powers_ptr,  # [layers of the slab, heads, head_dim] float32; quantised rows only
    angles_ptr,  # [positions, rotary_dim]: cosines, then sines
    cache_ptr,  # first layer's cache
    index_ptr,  # [3, num_tokens] int64: row, position, slot
    layers_ptr,  # [2, num_layers] int64: layer number in the slab, distance of its cache
    cache_scales_ptr,  # [2, num_layers] float32: of keys and values; fp8 caches only
    num_tokens,
    num_layers,
    num_heads,
    row_stride,
    layer_stride,
    head_stride,
    value_offset,
    scale_offset,
    block_size,
    block_stride,
    cache_head_stride,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,  # powers of two, not below what they are made of
    PASSED: tl.constexpr,
    WIDTH: tl.constexpr,
    NEOX: tl.constexpr,
    PACKED: tl.constexpr,
    ROUNDING: tl.constexpr,
    MODEL_TYPE: tl.constexpr,
    FP8_CACHE: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer_index = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < num_tokens
    row = tl.load(index_ptr + token, mask=there, other=0)
    position = tl.load(index_ptr + num_tokens + token, mask=there, other=0)
    slot = tl.load(index_ptr + 2 * num_tokens + token, mask=there, other=0)
    layer = tl.load(layers_ptr + layer_index)
    # Whoever launches has checked this; without it the stores would be of single elements.
    distance = tl.multiple_of(tl.load(layers_ptr + num_layers + layer_index), 16)

    half: tl.constexpr = ROTARY_DIM // 2
    pair = tl.arange(0, HALF)
    turned = there[:, None] & (pair < half)[None, :]
    angle = angles_ptr + position[:, None] * ROTARY_DIM + pair[None, :]
    cosine = tl.load(angle, mask=turned, other=0.0).to(tl.float32)
    sine = tl.load(angle + half, mask=turned, other=0.0).to(tl.float32)
    if NEOX:
        low = pair
        high = pair + half
    else:
        low = 2 * pair
        high = 2 * pair + 1
    rest = ROTARY_DIM + tl.arange(0, PASSED)
    passed = there[:, None] & (rest < HEAD_DIM)[None, :]
    wide = tl.arange(0, WIDTH)
    whole = there[:, None] & (wide < HEAD_DIM)[None, :]

    source = rows_ptr + row[:, None] * row_stride + layer * layer_stride
    start = slot // block_size * block_stride + slot % block_size * slot_stride
    target = cache_ptr + distance + start[:, None]

    for head in range(num_heads):
        keys = source + head * head_stride
        out = target + head * cache_head_stride
        x = tl.load(keys + low[None, :], mask=turned)
        y = tl.load(keys + high[None, :], mask=turned)
        v = tl.load(keys + value_offset + wide[None, :], mask=whole)
        z = x
        if ROTARY_DIM < HEAD_DIM:
            z = tl.load(keys + rest[None, :], mask=passed)
        if PACKED:
            # Exact: code, scale and power have so few bits that no product is rounded.
            scale = scales_ptr + row * (row_stride // 2) + head * (head_stride // 2)
            scale = scale + scale_offset // 2 + layer * 2
            key_scale = tl.load(scale, mask=there, other=0.0).to(tl.float32)[:, None]
            value_scale = tl.load(scale + 1, mask=there, other=0.0).to(tl.float32)[:, None]
            powers = powers_ptr + (layer * num_heads + head) * HEAD_DIM
            low_power = tl.load(powers + low, mask=pair < half, other=0.0)[None, :]
            high_power = tl.load(powers + high, mask=pair < half, other=0.0)[None, :]
            x = (x.to(tl.float32) * key_scale * low_power).to(MODEL_TYPE)
            y = (y.to(tl.float32) * key_scale * high_power).to(MODEL_TYPE)
            v = (v.to(tl.float32) * value_scale).to(MODEL_TYPE)
            if ROTARY_DIM < HEAD_DIM:
                rest_power = tl.load(powers + rest, mask=rest < HEAD_DIM, other=0.0)[None, :]
                z = (z.to(tl.float32) * key_scale * rest_power).to(MODEL_TYPE)
        x = x.to(tl.float32)
        y = y.to(tl.float32)
        if ROUNDING == 0:
            first = x * cosine - y * sine
            second = y * cosine + x * sine
        elif ROUNDING == 1:
            first = tl.fma(x, cosine, -(y * sine))
            second = tl.fma(y, cosine, x * sine)
        elif ROUNDING == 2:
            first = tl.fma(-y, sine, x * cosine)
            second = tl.fma(x, sine, y * cosine)
        else:
            first = (x * cosine).to(MODEL_TYPE).to(tl.float32)
            first = first - (y * sine).to(MODEL_TYPE).to(tl.float32)
            second = (y * cosine).to(MODEL_TYPE).to(tl.float32)
            second = second + (x * sine).to(MODEL_TYPE).to(tl.float32)
        first = first.to(MODEL_TYPE)
        second = second.to(MODEL_TYPE)
        if FP8_CACHE:
            by = tl.load(cache_scales_ptr + layer_index)
            first = tl.math.div_rn(first.to(tl.float32), by)
            second = tl.math.div_rn(second.to(tl.float32), by)
            first = tl.minimum(tl.maximum(first, -LIMIT), LIMIT).to(tl.float8e4nv)
            second = tl.minimum(tl.maximum(second, -LIMIT), LIMIT).to(tl.float8e4nv)
            value_by = tl.load(cache_scales_ptr + num_layers + layer_index)
            v = tl.math.div_rn(v.to(tl.float32), value_by)
            v = tl.minimum(tl.maximum(v, -LIMIT), LIMIT).to(tl.float8e4nv)
            if ROTARY_DIM < HEAD_DIM:
                z = tl.math.div_rn(z.to(tl.float32), by)
                z = tl.minimum(tl.maximum(z, -LIMIT), LIMIT).to(tl.float8e4nv)
        tl.store(out + low[None, :], first, mask=turned)
        tl.store(out + high[None, :], second, mask=turned)
        tl.store(out + HEAD_DIM + wide[None, :], v, mask=whole)
        if ROTARY_DIM < HEAD_DIM:
            tl.store(out + rest[None, :], z, mask=passed)
