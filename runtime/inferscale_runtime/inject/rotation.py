"""Rotary embedding of stored keys (needs torch, not vLLM).

The tables are the model's own (``cos_sin_cache`` of its rotary module), so Llama-3 scaling and
linear scaling are inherited. Source of the formula: RoFormer (arXiv 2104.09864), in the two layouts
of vLLM 0.32 ``model_executor/layers/rotary_embedding/common.py``.
"""

from __future__ import annotations

import torch


def rotate_keys(
    keys: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, is_neox: bool
) -> torch.Tensor:
    """Rotates keys to their positions.

    Args:
        keys: ``[num_tokens, num_kv_heads, head_dim]`` before rope; not changed.
        positions: ``[num_tokens]`` int64, 0-based prompt positions.
        cos_sin: ``[max_position, rotary_dim]``, cosines then sines, in the model's dtype.
        is_neox: True for halves (Llama), False for interleaved pairs (GPT-J).

    Returns:
        New tensor of the same shape and dtype.
    """
    table = cos_sin.index_select(0, positions).unsqueeze(1)
    cos, sin = table.chunk(2, dim=-1)
    rotary_dim = cos_sin.shape[-1]
    result = torch.empty_like(keys, memory_format=torch.contiguous_format)
    if is_neox:
        half = rotary_dim // 2
        first, second = keys[..., :half], keys[..., half:rotary_dim]
        out_first, out_second = result[..., :half], result[..., half:rotary_dim]
    else:
        first, second = keys[..., 0:rotary_dim:2], keys[..., 1:rotary_dim:2]
        out_first, out_second = result[..., 0:rotary_dim:2], result[..., 1:rotary_dim:2]
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    if rotary_dim < keys.shape[-1]:
        result[..., rotary_dim:] = keys[..., rotary_dim:]
    return result
