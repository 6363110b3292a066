"""Sizes of quantised KV rows (pure; see ``rows`` for what the bytes mean)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

KVDtype = Literal["auto", "int8", "fp8"]
"""How KV is stored: ``auto`` as the model computes it, else quantised."""
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)

SCALE_BYTES = 2
"""Scales are bfloat16."""
ROW_ALIGNMENT = 16
"""So that a GPU reads 16 bytes at once."""


@dataclass(frozen=True, slots=True)
class PackedShape:
    """Shape of packed rows, ``[num_tokens, num_kv_heads, head_bytes]`` uint8.

    Attributes:
        kind: ``int8`` or ``fp8`` (e4m3).
        num_layers: Layers with a KV cache.
        num_kv_heads: KV heads in a row.
        head_dim: Elements of one head.
    """

    kind: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(
        cls, kv_dtype: str, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> PackedShape | None:
        """The shape of rows of a ``KVDtype``, None for plain ones."""
        return None if kv_dtype == "auto" else cls(kv_dtype, num_layers, num_kv_heads, head_dim)

    @property
    def code_bytes(self) -> int:
        """Bytes of one head's codes."""
        return self.num_layers * 2 * self.head_dim

    @property
    def head_bytes(self) -> int:
        """Bytes of one head: codes, scales and what aligns the next."""
        size = self.code_bytes + self.num_layers * 2 * SCALE_BYTES
        return -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.num_kv_heads * self.head_bytes

    def with_heads(self, num_kv_heads: int) -> PackedShape:
        """The shape of some of the heads."""
        return replace(self, num_kv_heads=num_kv_heads)
