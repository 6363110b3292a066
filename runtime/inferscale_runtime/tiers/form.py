"""Brings stored KV into the form that the arena keeps it in (API process).

Store and arena need not have the same form. A quantised store in a quantised arena is copied as it
is; a plain store is quantised here, and a quantised one unpacked where the arena is plain.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from inferscale_runtime.packing.rows import PackedKV, channel_exponents, pack
from inferscale_runtime.store.kvfile import Layout
from inferscale_runtime.store.tensors import DTYPES as STORED
from inferscale_runtime.store.tensors import byte_view
from inferscale_runtime.tiers.slab import DTYPES, SlabShape, write_exponents


class SlabForm:
    """Converts rows.

    Args:
        shape: Of the slab.
        folder: The server's shared-memory files.
    """

    def __init__(self, shape: SlabShape, folder: Path) -> None:
        self._shape = shape
        self._folder = folder
        self._lock = threading.Lock()
        self._exponents: torch.Tensor | None = None

    def __call__(self, kv: torch.Tensor | PackedKV) -> torch.Tensor:
        """Rows as they stand in the slab.

        The first rows decide the exponents of a quantised slab. They are the preamble's, which
        every store has; rows with other exponents are quantised again.

        Args:
            kv: ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]`` or quantised rows.
        """
        dtype, packed = DTYPES[self._shape.dtype], self._shape.packed
        if packed is None:
            return kv.unpack(dtype) if isinstance(kv, PackedKV) else kv
        exponents = self._fixed(kv)
        if isinstance(kv, PackedKV):
            if kv.shape == packed and torch.equal(kv.exponents, exponents):
                return kv.rows
            kv = kv.unpack(torch.float32)
        return pack(kv, packed.kind, exponents).rows

    def takes(self, layout: Layout) -> bool:
        """Whether a stored segment's bytes are those of the slab's rows, as they are."""
        shape, packed = self._shape, self._shape.packed
        if packed is None:
            sizes = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
            same = (layout.layers, layout.heads, layout.dim) == sizes
            return same and STORED.get(layout.dtype) == DTYPES[shape.dtype]
        with self._lock:
            fixed = self._exponents
        if fixed is None or layout.packed != packed:
            return False
        return layout.exponents == bytes(byte_view(fixed.contiguous()))

    def _fixed(self, kv: torch.Tensor | PackedKV) -> torch.Tensor:
        with self._lock:
            if self._exponents is None:
                own = kv.exponents if isinstance(kv, PackedKV) else channel_exponents(kv)
                write_exponents(self._folder, own)
                self._exponents = own
            return self._exponents
