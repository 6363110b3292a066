"""Quantised KV rows: how one token's keys and values become bytes, and back (torch, no vLLM).

A packed row is ``[num_kv_heads, head_bytes]`` uint8, so that the heads of one rank are a plain
slice. One head holds its codes ``[num_layers, 2, head_dim]`` of one byte each, then its scales
``[num_layers, 2]`` in bfloat16, then zeros up to a multiple of 16 bytes.

    value = code * scale * 2 ** exponent

Every token and head has a scale of its own for keys and one for values. Keys before rope have
channels that are larger than the others for every token; the exponent of a key's channel levels
them out, values have none. Code (at most 8 bits), scale (8 bits) and power of two multiply exactly
in float32, so every reader of packed rows, in whatever order it multiplies, gets the same bits.

The exponents are made from the preamble's keys. They stand in every KV file, because a row means
nothing without them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferscale_runtime.packing.shape import SCALE_BYTES, PackedShape

CODES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Name of the quantisation -> type of a code."""
LIMITS = {"int8": 127.0, "fp8": 448.0}
"""Largest code."""
EXPONENT_RANGE = 6
"""A channel is raised by at most 2 ** 6 towards its head's largest: it was seen in few tokens, and
where others have it larger, it must not take the whole head's range (arbitrary)."""
_SMALLEST = -60


@dataclass(frozen=True, eq=False)
class PackedKV:
    """Packed rows with what they mean.

    Attributes:
        shape: Their shape.
        rows: ``[num_tokens, num_kv_heads, head_bytes]`` uint8 on the CPU.
        exponents: ``[num_layers, num_kv_heads, head_dim]`` int8.
    """

    shape: PackedShape
    rows: torch.Tensor
    exponents: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.nbytes

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]``."""
        layers = [
            torch.stack(unpack_layer(self.rows, self.shape, self.exponents, layer, dtype), 1)
            for layer in range(self.shape.num_layers)
        ]
        return torch.stack(layers, 1)


def codes_of(rows: torch.Tensor, shape: PackedShape) -> torch.Tensor:
    """View of the codes, ``[num_tokens, num_kv_heads, num_layers, 2, head_dim]``."""
    flat = rows[:, :, : shape.code_bytes].view(CODES[shape.kind])
    return flat.view(*flat.shape[:2], shape.num_layers, 2, shape.head_dim)


def scales_of(rows: torch.Tensor, shape: PackedShape) -> torch.Tensor:
    """View of the scales, ``[num_tokens, num_kv_heads, num_layers, 2]`` bfloat16."""
    first = shape.code_bytes // SCALE_BYTES
    flat = rows.view(torch.bfloat16)[:, :, first : first + shape.num_layers * 2]
    return flat.view(*flat.shape[:2], shape.num_layers, 2)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """``2 ** exponents`` in float32, exactly."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def channel_exponents(kv: torch.Tensor) -> torch.Tensor:
    """How large each channel of the keys is, as a power of two.

    Args:
        kv: ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]``, keys before rope, of the
            preamble. The first token is left out where there are others: it attracts attention and
            is like none.

    Returns:
        ``[num_layers, num_kv_heads, head_dim]`` int8.
    """
    seen = kv[1:, :, 0] if len(kv) > 1 else kv[:, :, 0]
    largest = seen.float().abs().amax(0)
    exponents = torch.frexp(largest).exponent.clamp(_SMALLEST, -_SMALLEST)
    exponents = torch.where(largest == 0, _SMALLEST, exponents)
    top = exponents.amax(-1, keepdim=True)
    return torch.maximum(exponents, top - EXPONENT_RANGE).to(torch.int8)


def pack(kv: torch.Tensor, kind: str, exponents: torch.Tensor) -> PackedKV:
    """Quantises rows.

    Args:
        kv: ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]``, keys before rope, CPU.
        kind: ``int8`` or ``fp8``.
        exponents: From ``channel_exponents``.
    """
    num_tokens, num_layers, _, num_heads, head_dim = kv.shape
    shape = PackedShape(kind, num_layers, num_heads, head_dim)
    level = kv.to(torch.float32, copy=True)
    level[:, :, 0] *= powers_of_two(-exponents)
    level = level.permute(0, 3, 1, 2, 4)
    scales = (level.abs().amax(-1) / LIMITS[kind]).to(torch.bfloat16)
    # Divided by what readers multiply by: the rounded scale. A head of zeros has the scale 0.
    divisor = torch.where(scales == 0, 1.0, scales.float()).unsqueeze(-1)
    codes = (level / divisor).clamp(-LIMITS[kind], LIMITS[kind])
    if kind == "int8":
        codes = codes.round()
    rows = torch.zeros((num_tokens, num_heads, shape.head_bytes), dtype=torch.uint8)
    codes_of(rows, shape).copy_(codes)
    scales_of(rows, shape).copy_(scales)
    return PackedKV(shape, rows, exponents)


def unpack_layer(
    rows: torch.Tensor,
    shape: PackedShape,
    exponents: torch.Tensor,
    layer: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's keys and values.

    Args:
        rows: ``[num_tokens, num_kv_heads, head_bytes]`` uint8.
        shape: Shape of these rows.
        exponents: ``[num_layers, num_kv_heads, head_dim]`` int8, on the rows' device.
        layer: Which.
        dtype: Of the result; the product is exact in float32 and rounded once.

    Returns:
        Keys and values, each ``[num_tokens, num_kv_heads, head_dim]`` and contiguous.
    """
    scales = scales_of(rows, shape)[:, :, layer].float().unsqueeze(-1)
    codes = codes_of(rows, shape)[:, :, layer].float()
    keys = codes[:, :, 0] * scales[:, :, 0] * powers_of_two(exponents[layer])
    return keys.to(dtype), (codes[:, :, 1] * scales[:, :, 1]).to(dtype)
