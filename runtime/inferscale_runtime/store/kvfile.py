"""Layout of a KV file: safetensors with the tensor ``kv``, read by rows (no torch).

Quantised rows have the exponents of the keys' channels beside them; see ``packing``.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from typing import Any

from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.packing.shape import PackedShape
from inferscale_runtime.store.files import StoreFiles

#: Name of an element type in safetensors -> its bytes.
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
PACKED = ("int8", "fp8")
# Both forms of the header have well under 400 bytes.
_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape ``[rows, layers, 2, heads, dim]`` and element type of a KV file.

    Attributes:
        dtype: A name in ``ITEM_BYTES``, or ``int8`` or ``fp8`` for quantised rows.
        rows: Tokens.
        layers: Layers.
        heads: KV heads.
        dim: Elements of one head.
        exponents: Of quantised rows, ``[layers, heads, dim]`` int8.
    """

    dtype: str
    rows: int
    layers: int
    heads: int
    dim: int
    exponents: bytes = b""

    @property
    def packed(self) -> PackedShape | None:
        """Shape of quantised rows, None for plain ones."""
        if self.dtype not in PACKED:
            return None
        return PackedShape(self.dtype, self.layers, self.heads, self.dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's KV."""
        if packed := self.packed:
            return packed.row_bytes
        return self.layers * 2 * self.heads * self.dim * ITEM_BYTES[self.dtype]

    def header(self) -> bytes:
        """Returns the file's bytes before the first row, the same for the same layout."""
        size, first = self.rows * self.row_bytes, len(self.exponents)
        entries: dict[str, Any] = {}
        shape = [self.rows, self.layers, 2, self.heads, self.dim]
        kind = self.dtype
        if packed := self.packed:
            # The names and types of safetensors do not say what the bytes mean.
            entries["__metadata__"] = {
                "kv_dtype": self.dtype,
                "exponents_crc32": str(zlib.crc32(self.exponents)),
            }
            entries["exponents"] = {
                "dtype": "I8",
                "shape": [self.layers, self.heads, self.dim],
                "data_offsets": [0, first],
            }
            kind, shape = "U8", [self.rows, self.heads, packed.head_bytes]
        entries["kv"] = {"dtype": kind, "shape": shape, "data_offsets": [first, first + size]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + self.exponents


def _parse(entries: dict[str, Any]) -> Layout:
    if "exponents" not in entries:
        rows, layers, _, heads, dim = entries["kv"]["shape"]
        return Layout(entries["kv"]["dtype"], rows, layers, heads, dim)
    layers, heads, dim = entries["exponents"]["shape"]
    kind = entries["__metadata__"]["kv_dtype"]
    if kind not in PACKED or min(layers, heads, dim) < 1:
        raise ValueError(kind)
    return Layout(kind, entries["kv"]["shape"][0], layers, heads, dim)


def read_layout(files: StoreFiles, path: str) -> Layout:
    """Reads and checks a KV file's header against the file's length.

    Raises:
        DamagedStoreError: If it is missing, truncated or not what the writer writes.
    """
    try:
        size = files.size(path)
        head = bytes(files.read_ranges(path, [(0, min(size, _HEAD_BYTES))])[0])
    except FileNotFoundError as exc:
        raise DamagedStoreError(path, "it is missing") from exc
    try:
        end = 8 + int.from_bytes(head[:8], "little")
        layout = _parse(json.loads(head[8:end]))
        if layout.packed:
            count = layout.layers * layout.heads * layout.dim
            if size != end + count + layout.rows * layout.row_bytes:
                raise DamagedStoreError(path, f"it has {size} bytes, its header tells otherwise")
            table = bytes(files.read_ranges(path, [(end, end + count)])[0])
            layout = replace(layout, exponents=table)
            head = head[:end] + table
            end += count
        # Only the canonical header is accepted, so a changed byte cannot pass as another shape.
        canonical = layout.header() == head[:end]
    except (ValueError, KeyError, TypeError) as exc:
        raise DamagedStoreError(path, "its header is not readable") from exc
    if not canonical:
        raise DamagedStoreError(path, "its header is not the one that was written")
    if size != end + layout.rows * layout.row_bytes:
        raise DamagedStoreError(path, f"it has {size} bytes, its header tells otherwise")
    return layout
