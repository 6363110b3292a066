"""Between torch tensors and the bytes of a KV file."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.packing.rows import PackedKV
from inferscale_runtime.store.files import Buffer
from inferscale_runtime.store.kvfile import Layout

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""Name of an element type in safetensors -> torch's."""

StoredKV = torch.Tensor | PackedKV
"""Plain rows ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]``, or quantised ones."""


def layout_of(tensors: Sequence[StoredKV], tokens: Sequence[int]) -> Layout:
    """Returns the layout of a file that holds the tensors one after another.

    Args:
        tensors: Plain rows or quantised ones, all alike.
        tokens: Number of tokens that each must have.

    Raises:
        ConfigError: If a shape or element type is wrong or differs from the others.
    """
    layouts = [_layout(tensor, count) for tensor, count in zip(tensors, tokens, strict=True)]
    kinds = {(one.dtype, one.layers, one.heads, one.dim, one.exponents) for one in layouts}
    if len(kinds) > 1:
        raise ConfigError("kv of one fingerprint differs in dtype or shape between facts")
    first = layouts[0]
    rows = sum(tokens)
    return Layout(first.dtype, rows, first.layers, first.heads, first.dim, first.exponents)


def _layout(kv: StoredKV, count: int) -> Layout:
    if isinstance(kv, PackedKV):
        if len(kv.rows) != count:
            raise ConfigError(f"kv has {len(kv.rows)} rows for {count} tokens")
        shape, table = kv.shape, bytes(to_buffer(kv.exponents))
        return Layout(
            shape.kind, count, shape.num_layers, shape.num_kv_heads, shape.head_dim, table
        )
    if kv.dtype not in _NAMES:
        raise ConfigError(f"kv has dtype {kv.dtype}; use float32, float16 or bfloat16")
    shape_found = list(kv.shape)
    if len(shape_found) != 5 or shape_found[2] != 2 or 0 in shape_found or shape_found[0] != count:
        raise ConfigError(
            f"kv has shape {shape_found} for {count} tokens; it must be "
            "[num_tokens, num_layers, 2, num_kv_heads, head_dim]"
        )
    _, layers, _, heads, dim = shape_found
    return Layout(_NAMES[kv.dtype], count, layers, heads, dim)


def to_buffer(kv: StoredKV) -> Buffer:
    """Returns the bytes in C order, without a copy where they lie so on the CPU."""
    tensor = kv.rows if isinstance(kv, PackedKV) else kv
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def byte_view(rows: torch.Tensor) -> memoryview:
    """Returns the bytes of contiguous rows on the CPU, to be written to."""
    return rows.view(-1).view(torch.uint8).numpy().data


def plain_from_buffer(data: Buffer, layout: Layout) -> torch.Tensor:
    """Returns the tensor of whole plain rows."""
    flat = torch.frombuffer(_writable(data), dtype=DTYPES[layout.dtype])
    return flat.view(-1, layout.layers, 2, layout.heads, layout.dim)


def from_buffer(data: Buffer, layout: Layout) -> StoredKV:
    """Returns whole rows."""
    packed = layout.packed
    if packed is None:
        return plain_from_buffer(data, layout)
    rows = torch.frombuffer(_writable(data), dtype=torch.uint8)
    table = torch.frombuffer(bytearray(layout.exponents), dtype=torch.int8)
    return PackedKV(
        packed,
        rows.view(-1, layout.heads, packed.head_bytes),
        table.view(layout.layers, layout.heads, layout.dim),
    )


def _writable(data: Buffer) -> bytearray:
    # torch warns about read-only memory, which is what a remote file system hands out.
    return data if isinstance(data, bytearray) else bytearray(data)
