"""The Triton writer: one launch for all layers, into the caches of vLLM's GPU backends.

Needs torch and triton, imports no vLLM. It knows the cache that vLLM 0.32 gives FlashAttention,
FlashInfer and its own Triton backend: ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]`` of
any strides, a slot's value behind its key. Whether a layer really reads it so is proved at start
(``check.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferscale_runtime.inject.writer import (
    LayerTarget,
    Placement,
    Unpacking,
    WriterUnavailableError,
)
from inferscale_runtime.packing.rows import CODES, powers_of_two
from inferscale_runtime.packing.shape import PackedShape
from inferscale_runtime.tiers.slab import rank_rows

ALIGNMENT = 16
"""Elements; what the kernel was told of the caches' places."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers of one KV cache group, as the kernel is told of them."""

    first: torch.Tensor
    layers: torch.Tensor
    scales: torch.Tensor | None


class TritonWriter:
    """Gathers, unpacks, rotates and writes in one launch for each KV cache group.

    Args:
        slab: ``[num_rows, num_layers, 2, num_kv_heads, head_dim]`` of the model's type, keys before
            rope, or quantised rows. On another device than the caches it is gathered there first.
        heads: KV heads of this rank.
        rotary: The model's rotary module.
        kernel: From ``triton_kernel.load_kernel``.
        rounding: One of ``triton_kernel.ROUNDINGS``; the model's own rotation decides.
        dtype: Of the model's keys and values.
        unpacking: Of quantised rows, of as many heads as the slab has; None for plain ones.
    """

    def __init__(
        self,
        slab: torch.Tensor,
        heads: slice,
        rotary: Any,
        kernel: Any,
        rounding: int,
        dtype: torch.dtype,
        unpacking: Unpacking | None = None,
    ) -> None:
        self._slab = rank_rows(slab, heads)
        self._rotary = rotary
        self._kernel = kernel
        self._rounding = rounding
        self._dtype = dtype
        self._packed = unpacking.shape.with_heads(self._slab.shape[1]) if unpacking else None
        own = unpacking.of_rank(heads).exponents if unpacking else None
        self._powers = None if own is None else powers_of_two(own)
        self._groups: dict[tuple[int, ...], _Group] = {}

    def write(self, layers: Sequence[LayerTarget], placements: Sequence[Placement]) -> None:
        """See ``PortableWriter.write``; returns when the launches are enqueued."""
        self.write_from(self._slab, layers, placements)

    def write_from(
        self,
        slab: torch.Tensor,
        layers: Sequence[LayerTarget],
        placements: Sequence[Placement],
    ) -> None:
        """As ``write`` from other rows of the same form.

        Args:
            slab: Rows of this rank's heads.
            layers: The layers of this rank.
            placements: One for each KV cache group; ``rows`` on the slab's device.
        """
        for group, placement in enumerate(placements):
            members = [layer for layer in layers if layer.group == group]
            if members and len(placement.rows):
                self._launch(slab, members, placement)

    def _launch(
        self, slab: torch.Tensor, members: Sequence[LayerTarget], placement: Placement
    ) -> None:
        from inferscale_runtime.inject import triton_kernel

        group = self._group(members)
        cache = group.first
        rows = placement.rows
        if slab.device != cache.device:
            slab = slab.index_select(0, rows).to(cache.device)
            rows = torch.arange(len(rows), device=cache.device)
        index = torch.stack([rows, placement.positions, placement.slots])
        angles = self._rotary.cos_sin_cache
        head_dim, rotary_dim = cache.shape[3] // 2, angles.shape[1]
        codes, scales, powers = slab, slab, slab
        if self._packed is not None and self._powers is not None:
            # Once: afterwards they are on the caches' device.
            self._powers = self._powers.to(cache.device)
            codes, scales = slab.view(CODES[self._packed.kind]), slab.view(torch.bfloat16)
            powers = self._powers
        num_tokens, num_layers = len(rows), len(members)
        grid = (-(-num_tokens // triton_kernel.BLOCK), num_layers)
        self._kernel[grid](
            codes,
            scales,
            powers,
            angles,
            cache,
            index,
            group.layers,
            group.layers if group.scales is None else group.scales,
            num_tokens,
            num_layers,
            cache.shape[1],
            *_strides(slab, self._packed),
            cache.shape[2],
            cache.stride(0),
            cache.stride(1),
            cache.stride(2),
            HEAD_DIM=head_dim,
            ROTARY_DIM=rotary_dim,
            HALF=_power_of_two(rotary_dim // 2),
            PASSED=_power_of_two(head_dim - rotary_dim),
            WIDTH=_power_of_two(head_dim),
            NEOX=bool(self._rotary.is_neox_style),
            PACKED=self._packed is not None,
            ROUNDING=self._rounding,
            MODEL_TYPE=triton_kernel.TYPES[self._dtype],
            FP8_CACHE=group.scales is not None,
            LIMIT=triton_kernel.FP8_MAX,
            BLOCK=triton_kernel.BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )

    def _group(self, members: Sequence[LayerTarget]) -> _Group:
        """Looked up once for the same caches: they stay where they are while vLLM runs."""
        key = tuple(member.module.kv_cache.data_ptr() for member in members)
        if key not in self._groups:
            self._groups[key] = _describe(members)
        return self._groups[key]


def _describe(members: Sequence[LayerTarget]) -> _Group:
    caches = [member.module.kv_cache for member in members]
    first = caches[0]
    item = first.element_size()
    distances = [(cache.data_ptr() - first.data_ptr()) // item for cache in caches]
    layers = torch.tensor([[m.index for m in members], distances], device=first.device)
    scales = None
    if item == 1:
        kinds = [[getattr(m.module, name) for m in members] for name in ("_k_scale", "_v_scale")]
        scales = torch.tensor([[float(s) for s in kind] for kind in kinds], device=first.device)
        # The kernel makes fp8 values; whether the bytes are named so does not matter.
        first = first.view(torch.float8_e4m3fn)
    return _Group(first, layers, scales)


def _strides(slab: torch.Tensor, packed: PackedShape | None) -> tuple[int, int, int, int, int]:
    """Row, layer and head strides, and the way to values and scales; in elements."""
    if packed is None:
        row, layer, value, head, _ = slab.stride()
        return row, layer, head, value, 0
    return (
        slab.stride(0), 2 * packed.head_dim, packed.head_bytes, packed.head_dim, packed.code_bytes
    )  # fmt: skip


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def check_triton_layout(layers: Sequence[LayerTarget], rotary: Any, dtype: torch.dtype) -> None:
    """Refuses what the kernel has no code for.

    Raises:
        WriterUnavailableError: Naming it.
    """
    first = layers[0].module.kv_cache
    for layer in layers:
        reason = _cache_problem(layer, first, dtype)
        if reason:
            raise WriterUnavailableError(f"the cache of layer {layer.index} {reason}")
    angles = getattr(rotary, "cos_sin_cache", None)
    if not isinstance(angles, torch.Tensor) or angles.dim() != 2 or not angles.is_contiguous():
        raise WriterUnavailableError("the rotary module has no table of angles")
    if angles.device != first.device or angles.shape[1] > first.shape[3] // 2:
        raise WriterUnavailableError("the rotary module's angles do not fit the cache")


def _cache_problem(layer: LayerTarget, first: torch.Tensor, dtype: torch.dtype) -> str | None:
    cache = layer.module.kv_cache
    if cache.dim() != 4 or cache.shape[1:] != first.shape[1:] or cache.shape[3] % 2:
        return f"has the shape {tuple(cache.shape)}"
    if cache.stride() != first.stride() or cache.stride(3) != 1:
        return f"has the strides {cache.stride()}"
    if (cache.data_ptr() - first.data_ptr()) % (ALIGNMENT * cache.element_size()):
        return "is not aligned to the first layer's"
    kind = str(getattr(layer.module.impl, "kv_cache_dtype", "auto"))
    if cache.element_size() == 1 and kind not in ("fp8", "fp8_e4m3"):
        return f"is of the kind '{kind}'"
    if cache.element_size() == 1 and getattr(layer.module, "calculate_kv_scales", False):
        return "gets its scales later, from the first prompts"
    if cache.element_size() > 1 and cache.dtype != dtype:
        return f"is {cache.dtype}"
    return None
