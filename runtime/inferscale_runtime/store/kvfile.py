"""Layout of a KV file: safetensors with one tensor ``kv``, read by rows (no torch)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.store.files import StoreFiles

#: Name of an element type in safetensors -> its bytes.
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# The header of one tensor has well under 200 bytes.
_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape ``[rows, layers, 2, heads, dim]`` and element type of a KV file."""

    dtype: str
    rows: int
    layers: int
    heads: int
    dim: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's KV."""
        return self.layers * 2 * self.heads * self.dim * ITEM_BYTES[self.dtype]

    def header(self) -> bytes:
        """Returns the file's bytes before the first row, the same for the same layout."""
        entry = {
            "dtype": self.dtype,
            "shape": [self.rows, self.layers, 2, self.heads, self.dim],
            "data_offsets": [0, self.rows * self.row_bytes],
        }
        text = json.dumps({"kv": entry}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


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
        entry = json.loads(head[8:end])["kv"]
        rows, layers, _, heads, dim = entry["shape"]
        layout = Layout(entry["dtype"], rows, layers, heads, dim)
        # Only the canonical header is accepted, so a changed byte cannot pass as another shape.
        canonical = layout.header() == head[:end]
    except (ValueError, KeyError, TypeError) as exc:
        raise DamagedStoreError(path, "its header is not readable") from exc
    if not canonical:
        raise DamagedStoreError(path, "its header is not the one that was written")
    if size != end + rows * layout.row_bytes:
        raise DamagedStoreError(path, f"it has {size} bytes, its header tells otherwise")
    return layout
