"""The portable writer: stored rows to paged cache, layer by layer (needs torch, imports no vLLM).

Every layer writes through its own ``do_kv_cache_update``, the only writer that is right for every
backend's cache layout and the one that quantises for FP8 caches. Keys are rotated by the very
module that the model uses, so Llama-3 scaling and linear scaling are inherited bit for bit. One
layer's rows stay in the processor's cache between gathering, rotating and writing; all layers at
once would pass through memory three times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Rotate = Callable[[torch.Tensor, torch.Tensor, None], tuple[torch.Tensor, None]]
"""Rotary module: positions ``[num_tokens]`` and keys ``[num_tokens, num_heads * head_dim]``, which
it may change in place."""


@dataclass(frozen=True, slots=True)
class LayerTarget:
    """Where one layer's rows go.

    Attributes:
        index: Layer number in the slab.
        module: vLLM's attention layer.
        group: Its KV cache group.
    """

    index: int
    module: Any
    group: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Rows of the slab and their places, for one KV cache group.

    Attributes:
        rows: ``[num_tokens]`` int64 rows of the slab, on its device.
        positions: ``[num_tokens]`` int64 prompt positions, on the cache's device.
        slots: ``[num_tokens]`` int64 cache slots, on the cache's device.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class PortableWriter:
    """Gathers, rotates and writes.

    Args:
        slab: ``[num_rows, num_layers, 2, num_kv_heads, head_dim]``, keys before rope; on the CPU or
            on the cache's device.
        heads: KV heads of this rank.
        rotate: The model's rotary module.
    """

    def __init__(self, slab: torch.Tensor, heads: slice, rotate: Rotate) -> None:
        self._slab = slab[:, :, :, heads]
        self._rotate = rotate
        self._scratch = slab.new_empty((2, 0, *self._slab.shape[3:]))

    def write(self, layers: Sequence[LayerTarget], placements: Sequence[Placement]) -> None:
        """Writes one request's rows into all layers, on the current stream.

        Args:
            layers: The layers of this rank.
            placements: One for each KV cache group.
        """
        for layer in layers:
            placement = placements[layer.group]
            keys, values = self._gather(layer.index, placement.rows)
            device = layer.module.kv_cache.device
            keys, values = keys.to(device), values.to(device)
            rotated, _ = self._rotate(placement.positions, keys.flatten(1), None)
            layer.module.impl.do_kv_cache_update(
                layer.module,
                rotated.view(keys.shape),
                values,
                layer.module.kv_cache,
                placement.slots,
            )

    def _gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Fresh memory would cost a page fault every 4 KiB, more than the copy itself.
        if self._scratch.shape[1] < len(rows):
            self._scratch = self._scratch.new_empty((2, len(rows), *self._scratch.shape[2:]))
        keys, values = self._scratch[0, : len(rows)], self._scratch[1, : len(rows)]
        torch.index_select(self._slab[:, layer, 0], 0, rows, out=keys)
        torch.index_select(self._slab[:, layer, 1], 0, rows, out=values)
        return keys, values


def slab_rows(runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Rows of a request's segments.

    Args:
        runs: ``(first row, rows)`` in prompt order.

    Returns:
        ``[num_tokens]`` int64.
    """
    starts, counts = torch.tensor(runs, dtype=torch.int64).view(-1, 2).unbind(1)
    before = counts.cumsum(0) - counts
    rows = (starts - before).repeat_interleave(counts)
    return rows + torch.arange(len(rows))


def overlapping_runs(
    runs: Sequence[tuple[int, int]], first: int, last: int
) -> tuple[tuple[tuple[int, int], ...], int]:
    """The runs that hold positions from ``first`` up to ``last``, and the position of their start.

    Args:
        runs: ``(first row, rows)`` in prompt order.
        first: First position that is wanted.
        last: One past the last.
    """
    kept: list[tuple[int, int]] = []
    begin = position = 0
    for run in runs:
        if position < last and position + run[1] > first:
            begin = position if not kept else begin
            kept.append(run)
        position += run[1]
    return tuple(kept), begin
