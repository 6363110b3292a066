"""Quantised rows: sizes, errors, exactness of reading, and what attention makes of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_runtime.packing.rows import (
    PackedKV,
    channel_exponents,
    codes_of,
    pack,
    scales_of,
    unpack_layer,
)
from inferscale_runtime.packing.shape import PackedShape

KINDS = ("int8", "fp8")
# Of the largest element of a token's head: half a step of 127, and half a unit of 3 bits.
STEPS = {"int8": 0.5 / 127, "fp8": 2.0**-4}


def rows_of(seed: int, tokens: int = 40, heads: int = 2, dim: int = 64) -> torch.Tensor:
    """Keys with outlier channels, as models have them before rope, and a first token like none."""
    generator = torch.Generator().manual_seed(seed)
    channels = torch.exp(torch.randn((3, heads, dim), generator=generator) * 1.5)
    kv = torch.randn((tokens, 3, 2, heads, dim), generator=generator)
    kv[:, :, 0] *= channels
    kv[0] *= 30
    return kv


def test_sizes_of_a_row() -> None:
    shape = PackedShape("int8", 30, 3, 64)
    assert shape.head_bytes % 16 == 0
    assert shape.row_bytes == 3 * (30 * 2 * 64 + 30 * 2 * 2 + 8)
    plain = 30 * 2 * 3 * 64
    assert shape.row_bytes / (4 * plain) < 0.26, "a quarter of float32, scales included"
    assert PackedShape("fp8", 32, 8, 128).row_bytes / (2 * 32 * 2 * 8 * 128) < 0.51


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_error_of_an_element(kind: str, seed: int) -> None:
    kv = rows_of(seed)
    exponents = channel_exponents(kv)
    found = pack(kv, kind, exponents).unpack(torch.float32)
    level = kv.clone()
    level[:, :, 0] = torch.ldexp(level[:, :, 0], -exponents.int())
    largest = level.abs().amax(-1, keepdim=True)
    if kind == "int8":
        allowed = largest * STEPS[kind]
    else:
        # Floating codes are relative to themselves, down to the smallest of them.
        allowed = torch.maximum(level.abs() * STEPS[kind], largest * 2.0**-10 / 448)
    # The scale is rounded to 8 bits too: the largest code may be cut by as much.
    allowed = (allowed * 1.01 + largest * (2.0**-9 if kind == "int8" else 0)).expand_as(kv).clone()
    allowed[:, :, 0] = torch.ldexp(allowed[:, :, 0], exponents.int())
    assert bool(((found - kv).abs() <= allowed).all())


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.02), ("fp8", 0.08)])
def test_attention_over_quantised_rows(kind: str, bound: float) -> None:
    kv = rows_of(3, tokens=200)
    calibrated = channel_exponents(rows_of(3, tokens=30))
    found = pack(kv, kind, calibrated).unpack(torch.float32)
    query = torch.randn((50, 2, 64), generator=torch.Generator().manual_seed(9))

    def attend(rows: torch.Tensor) -> torch.Tensor:
        keys, values = rows[1:, 1, 0], rows[1:, 1, 1]
        scores = torch.einsum("qhd,thd->qht", query, keys) / 64**0.5 / 4
        return torch.einsum("qht,thd->qhd", scores.softmax(-1), values)

    exact = attend(kv)
    error = (attend(found) - exact).norm() / exact.norm()
    assert error < bound
    # Outlier channels are what the exponents are for: without them it is worse.
    level = pack(kv, kind, torch.zeros_like(calibrated)).unpack(torch.float32)
    if kind == "int8":
        assert error < (attend(level) - exact).norm() / exact.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_reading_is_exact(kind: str) -> None:
    packed = pack(rows_of(5), kind, channel_exponents(rows_of(6)))
    codes = codes_of(packed.rows, packed.shape).double()
    scales = scales_of(packed.rows, packed.shape).double().unsqueeze(-1)
    exact = codes * scales
    exact[:, :, :, 0] *= 2.0 ** packed.exponents.permute(1, 0, 2).double()
    found = packed.unpack(torch.float32).permute(0, 3, 1, 2, 4)
    assert torch.equal(found.double(), exact)
    keys, values = unpack_layer(packed.rows, packed.shape, packed.exponents, 1, torch.bfloat16)
    assert torch.equal(keys, found[:, :, 1, 0].to(torch.bfloat16))
    assert keys.is_contiguous()
    assert values.is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_quantising_twice(kind: str) -> None:
    kv = rows_of(7)
    kv[3:5] = 0
    kv[:, 1, 0, 1, 7] = 0
    exponents = channel_exponents(kv)
    once = pack(kv, kind, exponents)
    assert torch.equal(once.unpack(torch.float32)[3:5], torch.zeros_like(kv[3:5]))
    assert once.unpack(torch.float32)[:, 1, 0, 1, 7].eq(0).all()
    again = pack(once.unpack(torch.float32), kind, exponents)
    torch.testing.assert_close(
        again.unpack(torch.float32), once.unpack(torch.float32), rtol=0.02, atol=1e-2
    )


def test_heads_of_a_rank_are_a_slice() -> None:
    packed = pack(rows_of(8, heads=4), "int8", channel_exponents(rows_of(8, heads=4)))
    part = PackedKV(
        packed.shape.with_heads(2), packed.rows[:, 2:], packed.exponents[:, 2:].contiguous()
    )
    whole = packed.unpack(torch.float32)
    assert torch.equal(part.unpack(torch.float32), whole[:, :, :, 2:])


def test_a_channel_seen_small_does_not_take_the_range() -> None:
    kv = torch.ones((4, 1, 2, 1, 64))
    kv[:, 0, 0, 0, 3] = 1e-9
    kv[:, 0, 0, 0, 4] = 0
    exponents = channel_exponents(kv)
    assert exponents.amin() >= exponents.amax() - 6
