"""Between torch tensors and the bytes of a KV file."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.store.files import Buffer
from inferscale_runtime.store.kvfile import Layout

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def layout_of(tensors: Sequence[torch.Tensor], tokens: Sequence[int]) -> Layout:
    """Returns the layout of a file that holds the tensors one after another.

    Args:
        tensors: Each ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]``.
        tokens: Number of tokens that each must have.

    Raises:
        ConfigError: If a shape or element type is wrong or differs from the others.
    """
    first = tensors[0]
    if first.dtype not in _NAMES:
        raise ConfigError(f"kv has dtype {first.dtype}; use float32, float16 or bfloat16")
    for tensor, count in zip(tensors, tokens, strict=True):
        shape = list(tensor.shape)
        if len(shape) != 5 or shape[2] != 2 or 0 in shape or shape[0] != count:
            raise ConfigError(
                f"kv has shape {shape} for {count} tokens; it must be "
                "[num_tokens, num_layers, 2, num_kv_heads, head_dim]"
            )
        if tensor.dtype != first.dtype or shape[1:] != list(first.shape[1:]):
            raise ConfigError("kv of one fingerprint differs in dtype or shape between facts")
    _, layers, _, heads, dim = first.shape
    return Layout(_NAMES[first.dtype], sum(tokens), layers, heads, dim)


def to_buffer(tensor: torch.Tensor) -> Buffer:
    """Returns a tensor's bytes in C order, without a copy where it lies so on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def from_buffer(data: Buffer, layout: Layout) -> torch.Tensor:
    """Returns the tensor of whole rows."""
    # torch warns about read-only memory, which is what a remote file system hands out.
    writable = data if isinstance(data, bytearray) else bytearray(data)
    flat = torch.frombuffer(writable, dtype=_DTYPES[layout.dtype])
    return flat.view(-1, layout.layers, 2, layout.heads, layout.dim)
