"""The portable writer, with a cache and a rotary module of our own."""

from __future__ import annotations

import pytest
import torch

from inferscale_runtime.inject.writer import (
    LayerTarget,
    Placement,
    PortableWriter,
    overlapping_runs,
    slab_rows,
)

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 3, 4, 2


class FakeLayer:
    """Records what is written, as vLLM's attention layer and its ``impl`` in one."""

    def __init__(self) -> None:
        self.kv_cache = torch.zeros(1)
        self.impl = self
        self.keys = torch.full((16, 2, HEAD_DIM), -1.0)
        self.values = torch.full((16, 2, HEAD_DIM), -1.0)

    def do_kv_cache_update(
        self,
        layer: object,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        assert keys.is_contiguous()
        assert values.is_contiguous()
        self.keys[slots] = keys
        self.values[slots] = values


def rotate_in_place(
    positions: torch.Tensor, keys: torch.Tensor, _: None
) -> tuple[torch.Tensor, None]:
    keys += positions.unsqueeze(1) * 1000
    return keys, None


def test_rows_heads_places_and_groups() -> None:
    slab = torch.arange(10.0 * NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM).view(
        10, NUM_LAYERS, 2, NUM_HEADS, HEAD_DIM
    )
    before = slab.clone()
    heads = slice(2, 4)
    layers = [FakeLayer() for _ in range(NUM_LAYERS)]
    targets = [LayerTarget(n, layer, n % 2) for n, layer in enumerate(layers)]
    full = Placement(torch.tensor([7, 8, 1]), torch.tensor([3, 4, 5]), torch.tensor([9, 2, 12]))
    window = Placement(torch.tensor([1]), torch.tensor([5]), torch.tensor([0]))
    writer = PortableWriter(slab, heads, rotate_in_place)
    # Twice, the smaller first: the scratch memory grows and is used again.
    writer.write(targets, [window, window])
    writer.write(targets, [full, window])
    assert torch.equal(slab, before), "stored keys are never rotated in place"
    for n, layer in enumerate(layers):
        places = window if n % 2 else full
        shift = places.positions.view(-1, 1, 1) * 1000
        assert torch.equal(layer.keys[places.slots], slab[places.rows, n, 0, heads] + shift)
        assert torch.equal(layer.values[places.slots], slab[places.rows, n, 1, heads])


def test_slab_rows() -> None:
    assert slab_rows(((7, 2), (0, 3), (5, 0), (20, 1))).tolist() == [7, 8, 0, 1, 2, 20]
    assert slab_rows(()).tolist() == []


@pytest.mark.parametrize(
    ("first", "last", "kept", "begin"),
    [
        (0, 9, [(10, 2), (30, 3), (20, 4)], 0),
        (2, 9, [(30, 3), (20, 4)], 2),
        (1, 9, [(10, 2), (30, 3), (20, 4)], 0),
        (4, 9, [(30, 3), (20, 4)], 2),
        (5, 8, [(20, 4)], 5),
        (0, 2, [(10, 2)], 0),
        (2, 3, [(30, 3)], 2),
        (9, 9, [], 0),
    ],
)
def test_only_runs_with_wanted_positions_are_kept(
    first: int, last: int, kept: list[tuple[int, int]], begin: int
) -> None:
    runs = [(10, 2), (30, 3), (20, 4)]
    found, start = overlapping_runs(runs, first, last)
    assert (list(found), start) == (kept, begin)
    if kept:
        wanted = slab_rows(runs)[first:last]
        assert torch.equal(slab_rows(found)[first - start : last - start], wanted)
