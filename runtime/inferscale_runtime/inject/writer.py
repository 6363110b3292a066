"""The portable writer: stored rows to paged cache, layer by layer (needs torch, imports no vLLM).

Every layer writes through its own ``do_kv_cache_update``, the only writer that is right for every
backend's cache layout and the one that quantises for FP8 caches. Keys are rotated by the very
module that the model uses, so Llama-3 scaling and linear scaling are inherited bit for bit. One
layer's rows stay in the processor's cache between gathering, rotating and writing; all layers at
once would pass through memory three times. Quantised rows are a quarter as large: they are gathered
whole and unpacked layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inferscale_runtime.packing.rows import unpack_layer
from inferscale_runtime.packing.shape import PackedShape
from inferscale_runtime.tiers.slab import rank_rows

Rotate = Callable[[torch.Tensor, torch.Tensor, None], tuple[torch.Tensor, None]]
"""Rotary module: positions ``[num_tokens]`` and keys ``[num_tokens, num_heads * head_dim]``, which
it may change in place."""


class WriterUnavailableError(Exception):
    """Why a faster writer cannot be used; the portable one takes its place."""


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

    def to(self, device: torch.device) -> Placement:
        """All on one device."""
        return Placement(self.rows.to(device), self.positions.to(device), self.slots.to(device))


@dataclass(frozen=True, slots=True)
class Unpacking:
    """What the bytes of a quantised slab mean.

    Attributes:
        shape: Shape of its rows, all heads.
        exponents: ``[num_layers, num_kv_heads, head_dim]`` int8 on the CPU, all heads.
        dtype: Of keys and values as the model computes them.
    """

    shape: PackedShape
    exponents: torch.Tensor
    dtype: torch.dtype

    def of_rank(self, heads: slice) -> Unpacking:
        """The same for some of the heads."""
        exponents = self.exponents[:, heads].contiguous()
        return Unpacking(self.shape.with_heads(exponents.shape[1]), exponents, self.dtype)


class PortableWriter:
    """Gathers, unpacks, rotates and writes.

    Args:
        slab: ``[num_rows, num_layers, 2, num_kv_heads, head_dim]``, keys before rope, or quantised
            rows; on the CPU or on the cache's device.
        heads: KV heads of this rank.
        rotate: The model's rotary module.
        unpacking: Of quantised rows, of as many heads as the slab has; None for plain ones.
    """

    def __init__(
        self, slab: torch.Tensor, heads: slice, rotate: Rotate, unpacking: Unpacking | None = None
    ) -> None:
        self._slab = rank_rows(slab, heads)
        self._rotate = rotate
        self._unpacking = unpacking.of_rank(heads) if unpacking else None
        self._scratch = slab.new_empty((2, 0, *self._slab.shape[3:]))

    def write(self, layers: Sequence[LayerTarget], placements: Sequence[Placement]) -> None:
        """Writes one request's rows into all layers, on the current stream.

        Args:
            layers: The layers of this rank.
            placements: One for each KV cache group.
        """
        picked: dict[int, torch.Tensor] = {}
        for layer in layers:
            placement = placements[layer.group]
            device = layer.module.kv_cache.device
            if self._unpacking is None:
                keys, values = self._gather(layer.index, placement.rows)
                keys, values = keys.to(device), values.to(device)
            else:
                if layer.group not in picked:
                    picked[layer.group] = self._slab.index_select(0, placement.rows).to(device)
                keys, values = self._unpack(self._unpacking, picked[layer.group], layer.index)
            rotated, _ = self._rotate(placement.positions, keys.flatten(1), None)
            layer.module.impl.do_kv_cache_update(
                layer.module,
                rotated.view(keys.shape),
                values,
                layer.module.kv_cache,
                placement.slots,
            )

    @staticmethod
    def _unpack(
        unpacking: Unpacking, rows: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exponents = unpacking.exponents.to(rows.device)
        return unpack_layer(rows, unpacking.shape, exponents, layer, unpacking.dtype)

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
    # numpy: torch would wake its threads for each of these few numbers.
    starts, counts = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    before = counts.cumsum() - counts
    rows = np.repeat(starts - before, counts)
    return torch.from_numpy(rows + np.arange(len(rows)))


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
