"""Rotation of stored keys against the formula written out pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from inferscale_runtime.inject.rotation import rotate_keys

HEAD_DIM = 8
CASES = [(neox, rotary_dim) for neox in (True, False) for rotary_dim in (4, 8)]


def frequencies(rotary_dim: int) -> list[float]:
    return [10_000.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]


def table(rotary_dim: int, length: int = 64) -> torch.Tensor:
    angles = torch.outer(
        torch.arange(length, dtype=torch.float64),
        torch.tensor(frequencies(rotary_dim), dtype=torch.float64),
    )
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def reference(key: list[float], position: int, rotary_dim: int, is_neox: bool) -> list[float]:
    result = list(key)
    for i, frequency in enumerate(frequencies(rotary_dim)):
        a, b = (i, i + rotary_dim // 2) if is_neox else (2 * i, 2 * i + 1)
        turned = complex(key[a], key[b]) * complex(
            math.cos(position * frequency), math.sin(position * frequency)
        )
        result[a], result[b] = turned.real, turned.imag
    return result


def keys(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_tokens, 3, HEAD_DIM, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("is_neox", "rotary_dim"), CASES)
def test_equals_the_formula(is_neox: bool, rotary_dim: int) -> None:
    given, positions = keys(5), torch.tensor([0, 1, 17, 4, 63])
    before = given.clone()
    result = rotate_keys(given, positions, table(rotary_dim), is_neox=is_neox)
    expected = [
        [reference(head.tolist(), int(p), rotary_dim, is_neox) for head in token]
        for token, p in zip(given, positions, strict=True)
    ]
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(given, before), "the input is not changed"
    assert torch.equal(result[0], given[0]), "position 0 turns nothing"


@pytest.mark.parametrize(("is_neox", "rotary_dim"), CASES)
def test_scores_depend_on_the_distance_alone(is_neox: bool, rotary_dim: int) -> None:
    query, key = keys(2)[:1], keys(2)[1:]

    def score(at: int, back: int) -> torch.Tensor:
        turned = [
            rotate_keys(x, torch.tensor([p]), table(rotary_dim), is_neox=is_neox)
            for x, p in ((query, at), (key, at - back))
        ]
        return (turned[0] * turned[1]).sum(-1)

    torch.testing.assert_close(score(10, 7), score(60, 7))
    assert not torch.allclose(score(10, 7), score(10, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeps_dtype_and_takes_views(dtype: torch.dtype) -> None:
    pool = keys(6).to(dtype)
    view = pool[::2]  # not contiguous
    positions = torch.tensor([3, 4, 5])
    result = rotate_keys(view, positions, table(8).to(dtype), is_neox=True)
    same = rotate_keys(view.contiguous(), positions, table(8).to(dtype), is_neox=True)
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert torch.equal(result, same)
