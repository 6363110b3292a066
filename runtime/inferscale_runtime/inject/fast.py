"""The compiled writer: one pass over the slab for all layers, into vLLM's CPU cache.

Needs torch, imports no vLLM. It knows one cache layout (see ``native.cpp``) and float32 only; a
cache of any other kind, or one whose bytes differ from what the portable writer gives for the same
rows, is left to the portable writer (``check.py`` decides that at start).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferscale_runtime.inject.native import Job, NativeLibrary
from inferscale_runtime.inject.writer import (
    LayerTarget,
    Placement,
    Unpacking,
    WriterUnavailableError,
)
from inferscale_runtime.packing.rows import powers_of_two
from inferscale_runtime.tiers.slab import rank_rows

LINE = 16
"""Slots in one cache line of float32."""
MAX_HEAD_DIM = 512
KINDS = ("int8", "fp8")
"""Quantised rows that ``native.cpp`` knows, from 1 on; 0 is float32."""


class FastWriter:
    """Gathers, rotates and writes in one pass.

    Args:
        slab: ``[num_rows, num_layers, 2, num_kv_heads, head_dim]`` float32 on the CPU, keys before
            rope, or quantised rows.
        heads: KV heads of this rank.
        rotary: The model's rotary module.
        library: The compiled code.
        fused: Which product of the rotation is not rounded by itself: 0 none, 1 the first, 2 the
            second. The model's own kernel decides; see ``check.py``.
        unpacking: Of quantised rows; None for plain ones.
    """

    def __init__(
        self,
        slab: torch.Tensor,
        heads: slice,
        rotary: Any,
        library: NativeLibrary,
        fused: int,
        unpacking: Unpacking | None = None,
    ) -> None:
        assert slab.dtype == (torch.uint8 if unpacking else torch.float32), slab.dtype
        self._slab = rank_rows(slab, heads)
        self._rotary = rotary
        self._library = library
        self._fused = fused
        self._source = _source_of(self._slab, unpacking.of_rank(heads) if unpacking else None)

    def write(self, layers: Sequence[LayerTarget], placements: Sequence[Placement]) -> None:
        """See ``PortableWriter.write``; returns when all is written."""
        for group, placement in enumerate(placements):
            members = [layer for layer in layers if layer.group == group]
            if members and len(placement.rows):
                self._write_group(members, placement)

    def _write_group(self, layers: Sequence[LayerTarget], placement: Placement) -> None:
        angles = self._rotary.cos_sin_cache
        caches = [layer.module.kv_cache for layer in layers]
        _check_bounds(placement.rows, len(self._slab), "row")
        _check_bounds(placement.positions, len(angles), "position")
        _check_bounds(placement.slots, min(map(_num_slots, caches)), "slot")
        # They must outlive the call: the job holds bare addresses.
        numbers = torch.tensor(
            [
                [layer.index for layer in layers],
                [cache.data_ptr() for cache in caches],
                [cache.stride(0) for cache in caches],
                [cache.stride(1) for cache in caches],
            ]
        )
        units = split_units(placement.slots)
        source = self._source
        job = Job(
            slab=source.address,
            row_stride=source.row_stride,
            layer_stride=source.layer_stride,
            head_stride=source.head_stride,
            value_offset=source.value_offset,
            kind=source.kind,
            scale_offset=source.scale_offset,
            powers=source.powers.data_ptr() if source.powers is not None else None,
            num_heads=source.num_heads,
            head_dim=source.head_dim,
            rotary_dim=angles.shape[1],
            block_size=caches[0].shape[2],
            cos_sin=angles.data_ptr(),
            num_layers=len(layers),
            layers=numbers[0].data_ptr(),
            caches=numbers[1].data_ptr(),
            block_strides=numbers[2].data_ptr(),
            head_strides=numbers[3].data_ptr(),
            num_tokens=len(placement.rows),
            rows=placement.rows.data_ptr(),
            positions=placement.positions.data_ptr(),
            slots=placement.slots.data_ptr(),
            num_units=len(units) - 1,
            units=units.data_ptr(),
            fused=self._fused,
            num_threads=torch.get_num_threads() if self._library.parallel else 1,
            parallel=self._library.parallel,
        )
        self._library.write(job)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where rows lie; strides and offsets in bytes."""

    address: int
    num_heads: int
    head_dim: int
    row_stride: int
    layer_stride: int
    head_stride: int
    value_offset: int
    kind: int = 0
    scale_offset: int = 0
    powers: torch.Tensor | None = None


def _source_of(slab: torch.Tensor, unpacking: Unpacking | None) -> _Source:
    if unpacking is None:
        item = slab.element_size()
        row, layer, value, head, _ = (stride * item for stride in slab.stride())
        return _Source(slab.data_ptr(), slab.shape[3], slab.shape[4], row, layer, head, value)
    shape = unpacking.shape
    return _Source(
        slab.data_ptr(),
        shape.num_kv_heads,
        shape.head_dim,
        row_stride=slab.stride(0),
        layer_stride=2 * shape.head_dim,
        head_stride=shape.head_bytes,
        value_offset=shape.head_dim,
        kind=1 + KINDS.index(shape.kind),
        scale_offset=shape.code_bytes,
        powers=powers_of_two(unpacking.exponents),
    )


def _num_slots(cache: torch.Tensor) -> int:
    return cache.shape[0] * cache.shape[2]


def _check_bounds(values: torch.Tensor, limit: int, what: str) -> None:
    low, high = torch.aminmax(values)
    if int(low) < 0 or int(high) >= limit:
        raise IndexError(f"{what} {int(high)}: out of range, the limit is {limit}")


def split_units(slots: torch.Tensor) -> torch.Tensor:
    """Splits tokens into runs of consecutive slots that lie in one cache line.

    Args:
        slots: ``[num_tokens]`` int64, at least one.

    Returns:
        ``[num_units + 1]`` int64: where each run starts, and the number of tokens.
    """
    starts = torch.ones(len(slots) + 1, dtype=torch.bool)
    starts[1:-1] = (slots[1:] != slots[:-1] + 1) | (slots[1:] % LINE == 0)
    return starts.nonzero().flatten()


def check_layout(layers: Sequence[LayerTarget], rotary: Any, slab_dtype: torch.dtype) -> None:
    """Refuses what the compiled writer has no code for.

    Raises:
        WriterUnavailableError: Naming it.
    """
    if slab_dtype != torch.float32:
        raise WriterUnavailableError(f"KV is stored as {slab_dtype}; it knows float32 only")
    for layer in layers:
        cache = layer.module.kv_cache
        reason = _cache_problem(cache)
        if reason:
            raise WriterUnavailableError(f"the cache of layer {layer.index} {reason}")
        if cache.shape[2] != layers[0].module.kv_cache.shape[2]:
            raise WriterUnavailableError("the layers have different block sizes")
    angles = getattr(rotary, "cos_sin_cache", None)
    head_dim = layers[0].module.kv_cache.shape[3] // 2
    if not isinstance(angles, torch.Tensor) or not getattr(rotary, "is_neox_style", False):
        raise WriterUnavailableError("the rotary module is not of the rotate-half kind")
    rotary_dim = angles.shape[1]
    if angles.dtype != torch.float32 or not angles.is_contiguous() or angles.device.type != "cpu":
        raise WriterUnavailableError("the rotary module's angles are not float32 on the CPU")
    if head_dim % LINE or rotary_dim % LINE or not rotary_dim <= head_dim <= MAX_HEAD_DIM:
        raise WriterUnavailableError(f"head size {head_dim} with {rotary_dim} rotated is not known")


def _cache_problem(cache: torch.Tensor) -> str | None:
    if cache.device.type != "cpu":
        return f"is on {cache.device.type}"
    if cache.dtype != torch.float32:
        return f"is {cache.dtype}"
    if cache.dim() != 4 or cache.shape[2] % LINE or cache.shape[3] % 2:
        return f"has the shape {tuple(cache.shape)}"
    if cache.stride(3) != 1 or cache.stride(2) != cache.shape[3]:
        return f"has the strides {cache.stride()}"
    if cache.data_ptr() % 64 or cache.stride(0) % LINE or cache.stride(1) % LINE:
        return "is not aligned to cache lines"
    return None
