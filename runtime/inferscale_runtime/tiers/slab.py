"""The shared-memory files of one server: KV slab, leases and secret.

The API process creates them and is the only one that writes the slab; the engine's processes map
them. The folder is private (0700) and lies on tmpfs, so that the slab is memory.

``shape.json``
    what the slab holds: layers, heads, head_dim, dtype, quantisation, number of rows.
``slab``
    ``[num_rows, num_layers, 2, num_kv_heads, head_dim]``; index 0 of axis 2 is K before rope, 1 is
    V. Quantised: ``[num_rows, num_kv_heads, head_bytes]`` uint8, see ``packing``.
``exponents``
    ``[num_layers, num_kv_heads, head_dim]`` int8, those of all quantised rows; written once, before
    the first row.
``leases``
    ``[num_leases, 2]`` int64: generation and state. A lease keeps the segments of one request in
    place until the engine has let the request go, also through preemption and abort.
``stamps``
    ``[num_rows]`` int64. At the first row of each piece of a segment stands a number that no other
    piece ever had, 0 elsewhere: copies of rows on other tiers know by it whether they are current.
``secret``
    32 random bytes, key of the capability and of the cache salt.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from inferscale_runtime.packing.shape import PackedShape

NUM_LEASES = 65_536
SECRET_BYTES = 32

LEASE_FREE, LEASE_NEW, LEASE_ACTIVE, LEASE_DONE = 0, 1, 2, 3

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class SlabShape:
    """Shape of the slab.

    Attributes:
        num_rows: Tokens that fit.
        num_layers: Layers with a KV cache.
        num_kv_heads: KV heads in all, over all ranks.
        head_dim: Elements of one head.
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        kv_dtype: ``auto`` for rows of that type, ``int8`` or ``fp8`` for quantised ones.
    """

    num_rows: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str = "auto"

    @property
    def packed(self) -> PackedShape | None:
        """Shape of quantised rows, None for plain ones."""
        return PackedShape.of(self.kv_dtype, self.num_layers, self.num_kv_heads, self.head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        if packed := self.packed:
            return packed.row_bytes
        elements = self.num_layers * 2 * self.num_kv_heads * self.head_dim
        return elements * DTYPES[self.dtype].itemsize

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the slab's tensor."""
        if packed := self.packed:
            return (self.num_rows, self.num_kv_heads, packed.head_bytes)
        return (self.num_rows, self.num_layers, 2, self.num_kv_heads, self.head_dim)


# linux/mman.h, since Linux 5.14
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def create_run_files(folder: Path, shape: SlabShape) -> None:
    """Creates slab, leases and secret of one server.

    Args:
        folder: An existing private folder.
        shape: Shape of the slab.

    Raises:
        OSError: When the space is not there (``/dev/shm`` too small).
    """
    size = shape.num_rows * shape.row_bytes
    with open(folder / "slab", "w+b", opener=_private) as stream:
        # Reserve now: a full tmpfs must be an error at start, not a SIGBUS while serving.
        os.posix_fallocate(stream.fileno(), 0, size)
    with open(folder / "leases", "w+b", opener=_private) as stream:
        stream.truncate(NUM_LEASES * 16)
    with open(folder / "stamps", "w+b", opener=_private) as stream:
        stream.truncate(shape.num_rows * 8)
    with open(folder / "secret", "wb", opener=_private) as stream:
        stream.write(secrets.token_bytes(SECRET_BYTES))
    # Last, by rename: whoever sees the shape sees all of it.
    (folder / "shape.json.tmp").write_text(json.dumps(asdict(shape)))
    os.replace(folder / "shape.json.tmp", folder / "shape.json")


def load_shape(folder: Path) -> SlabShape | None:
    """Shape of an existing slab, or None while there is none."""
    try:
        return SlabShape(**json.loads((folder / "shape.json").read_text()))
    except FileNotFoundError:
        return None


def load_secret(folder: Path) -> bytes:
    """The server's secret key, 32 bytes."""
    return (folder / "secret").read_bytes()


def map_slab(folder: Path, shape: SlabShape) -> torch.Tensor:
    """Maps the slab as a tensor that shares its memory with the other processes."""
    with open(folder / "slab", "r+b") as stream:
        memory = mmap.mmap(stream.fileno(), shape.num_rows * shape.row_bytes)
    dtype = torch.uint8 if shape.packed else DTYPES[shape.dtype]
    return torch.frombuffer(memory, dtype=dtype).view(shape.tensor_shape)


def enter_pages(slab: torch.Tensor, *, write: bool) -> None:
    """Enters the slab's pages into this process's page table, in the background.

    The pages are there already (the API process reserved them); without this, each fact that is
    the first in its place would take a page fault for every few of them, while a request waits.

    Args:
        slab: From ``map_slab``.
        write: This process writes to it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ

    def enter() -> None:
        # An old kernel does not know the advice; then the faults come later, and nothing else does.
        begin, size = ctypes.c_void_p(slab.data_ptr()), ctypes.c_size_t(slab.nbytes)
        libc.madvise(begin, size, advice)

    # Not waited for: a large slab takes seconds.
    threading.Thread(target=enter, name="inferscale-pages", daemon=True).start()


def copy_rows(rows: torch.Tensor, runs: Sequence[torch.Tensor]) -> None:
    """Copies a segment's rows into the pieces of the slab that it was given."""
    done = 0
    for run in runs:
        run.copy_(rows[done : done + len(run)])
        done += len(run)


def rank_rows(slab: torch.Tensor, heads: slice) -> torch.Tensor:
    """View of one rank's heads of plain or quantised rows."""
    return slab[:, heads] if slab.dim() == 3 else slab[:, :, :, heads]


def write_exponents(folder: Path, exponents: torch.Tensor) -> None:
    """Writes the exponents of quantised rows; must come before the first row."""
    with open(folder / "exponents.tmp", "wb", opener=_private) as stream:
        stream.write(exponents.contiguous().numpy().tobytes())
    os.replace(folder / "exponents.tmp", folder / "exponents")


def load_exponents(folder: Path, shape: SlabShape) -> torch.Tensor | None:
    """Exponents of quantised rows; None for plain rows, and before there is a row."""
    try:
        flat = torch.frombuffer(bytearray((folder / "exponents").read_bytes()), dtype=torch.int8)
    except FileNotFoundError:
        return None
    return flat.view(shape.num_layers, shape.num_kv_heads, shape.head_dim)


def map_leases(folder: Path) -> npt.NDArray[np.int64]:
    """Maps the leases, ``[NUM_LEASES, 2]`` int64 (generation, state)."""
    return np.memmap(folder / "leases", dtype=np.int64, mode="r+", shape=(NUM_LEASES, 2))


def map_stamps(folder: Path, shape: SlabShape) -> npt.NDArray[np.int64]:
    """Maps the stamps, ``[num_rows]`` int64."""
    return np.memmap(folder / "stamps", dtype=np.int64, mode="r+", shape=(shape.num_rows,))
