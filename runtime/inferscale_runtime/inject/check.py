"""Chooses the writer at start, by proof: a faster one must write the portable one's bytes.

On the CPU that is the compiled one, on a GPU the Triton kernel.

The proof runs on scratch caches of the real layers' shape and strides, through the real layers' own
``do_kv_cache_update`` and the model's own rotary module, before any request is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from inferscale_runtime.inject.fast import FastWriter, check_layout
from inferscale_runtime.inject.gpu import TritonWriter, check_triton_layout
from inferscale_runtime.inject.native import NativeLibrary, build_library
from inferscale_runtime.inject.writer import (
    LayerTarget,
    Placement,
    PortableWriter,
    Unpacking,
    WriterUnavailableError,
)
from inferscale_runtime.packing.rows import channel_exponents, pack
from inferscale_runtime.packing.shape import PackedShape

_BLOCKS = 3
_ROWS = 64
_FUSED = (2, 1, 0)


class Writer(Protocol):
    """Writes one request's rows into all layers."""

    def write(self, layers: Sequence[LayerTarget], placements: Sequence[Placement]) -> None:
        """See ``PortableWriter.write``."""


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """What the choice needs to know of the slab.

    Attributes:
        num_layers: Layers in it.
        num_kv_heads: KV heads in all, over all ranks.
        head_dim: Elements of one head.
        dtype: Element type of the model's keys and values.
        heads: KV heads of this rank.
        kv_dtype: ``auto`` for rows of that type, ``int8`` or ``fp8`` for quantised ones.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    heads: slice
    kv_dtype: str = "auto"

    @property
    def packed(self) -> PackedShape | None:
        """Shape of quantised rows of all heads, None for plain ones."""
        return PackedShape.of(self.kv_dtype, self.num_layers, self.num_kv_heads, self.head_dim)

    def unpacking(self, exponents: torch.Tensor | None) -> Unpacking | None:
        """What the rows mean, given the slab's exponents."""
        packed = self.packed
        if packed is None:
            return None
        assert exponents is not None, "quantised rows without their exponents"
        return Unpacking(packed, exponents, self.dtype)


@dataclass(frozen=True, slots=True)
class WriterChoice:
    """Which writer is used and why.

    Attributes:
        name: ``native``, ``triton`` or ``portable``.
        reason: Why it is the portable one, or empty.
        open: Makes the writer over a slab and the exponents of its quantised rows.
    """

    name: str
    reason: str
    open: Callable[[torch.Tensor, torch.Tensor | None], Writer]


def choose_writer(
    mode: str,
    layers: Sequence[LayerTarget],
    rotary: Any,
    layout: SlabLayout,
    build: Callable[[], Path] = build_library,
    kernel: Any = None,
) -> WriterChoice:
    """Chooses the writer.

    Args:
        mode: ``auto`` or ``portable``.
        layers: This rank's layers, with their caches.
        rotary: The model's rotary module.
        layout: The slab.
        build: Makes the compiled library.
        kernel: The Triton kernel to use whatever the device is; for tests.

    Returns:
        The fastest writer where it is proved right, else the portable one with the reason.
    """

    def portable(slab: torch.Tensor, exponents: torch.Tensor | None) -> Writer:
        return PortableWriter(slab, layout.heads, rotary, layout.unpacking(exponents))

    if mode == "portable":
        return WriterChoice("portable", "inject.writer is 'portable'", portable)
    on_gpu = kernel is not None or layers[0].module.kv_cache.device.type != "cpu"
    try:
        if on_gpu:
            return _choose_triton(layers, rotary, layout, kernel)
        return _choose_native(layers, rotary, layout, build)
    except WriterUnavailableError as error:
        return WriterChoice("portable", str(error), portable)
    except Exception as error:  # of whatever kind: the portable writer needs nothing of this
        return WriterChoice("portable", f"{type(error).__name__}: {error}", portable)


def _choose_native(
    layers: Sequence[LayerTarget], rotary: Any, layout: SlabLayout, build: Callable[[], Path]
) -> WriterChoice:
    check_layout(layers, rotary, layout.dtype)
    library = NativeLibrary(build())

    def make(slab: torch.Tensor, unpacking: Unpacking | None, fused: int) -> Writer:
        return FastWriter(slab, layout.heads, rotary, library, fused, unpacking)

    fused = _prove(layers, rotary, layout, make, _FUSED)
    return WriterChoice(
        "native", "", lambda slab, exponents: make(slab, layout.unpacking(exponents), fused)
    )


def _choose_triton(
    layers: Sequence[LayerTarget], rotary: Any, layout: SlabLayout, kernel: Any
) -> WriterChoice:
    if find_spec("triton") is None:
        raise WriterUnavailableError("triton is not installed")
    from inferscale_runtime.inject.triton_kernel import ROUNDINGS, load_kernel

    check_triton_layout(layers, rotary, layout.dtype)
    kernel = kernel if kernel is not None else load_kernel()

    def make(slab: torch.Tensor, unpacking: Unpacking | None, rounding: int) -> Writer:
        return TritonWriter(slab, layout.heads, rotary, kernel, rounding, layout.dtype, unpacking)

    rounding = _prove(layers, rotary, layout, make, ROUNDINGS)
    return WriterChoice(
        "triton", "", lambda slab, exponents: make(slab, layout.unpacking(exponents), rounding)
    )


class _Mirror:
    """A layer with another cache: ``do_kv_cache_update`` reads everything else from the layer."""

    def __init__(self, module: Any, cache: torch.Tensor) -> None:
        self._module = module
        self.kv_cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _prove(
    layers: Sequence[LayerTarget],
    rotary: Any,
    layout: SlabLayout,
    make: Callable[[torch.Tensor, Unpacking | None, int], Writer],
    roundings: Sequence[int],
) -> int:
    """Finds the rounding that gives the portable writer's bytes in every kind of layer."""
    shape = (_ROWS, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    slab = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(layout.dtype)
    unpacking = None
    if layout.packed:
        packed = pack(slab, layout.kv_dtype, channel_exponents(slab))
        slab, unpacking = packed.rows, layout.unpacking(packed.exponents)
    probes = list(_one_of_each(layers))
    cache = probes[0].module.kv_cache
    placement = _awkward_placement(cache.shape[2], len(rotary.cos_sin_cache)).to(cache.device)
    slab = slab.to(cache.device)
    portable = PortableWriter(slab, layout.heads, rotary, unpacking)
    expected = _written(portable, probes, placement)
    worst = float("inf")
    for rounding in roundings:
        found = _written(make(slab, unpacking, rounding), probes, placement)
        pairs = list(zip(found, expected, strict=True))
        if all(torch.equal(_bits(a), _bits(b)) for a, b in pairs):
            return rounding
        worst = min(worst, max(float((a.float() - b.float()).abs().max()) for a, b in pairs))
    raise WriterUnavailableError(
        f"its bytes are not those of the layers' own writer (largest difference {worst:.2g})"
    )


def _one_of_each(layers: Sequence[LayerTarget]) -> Iterator[LayerTarget]:
    """The first and the last layer of each kind."""
    kinds: dict[Any, list[LayerTarget]] = {}
    for layer in layers:
        cache = layer.module.kv_cache
        kind = (
            type(layer.module.impl),
            cache.shape[1:],
            cache.stride()[1:],
            getattr(layer.module, "isa", None),
            getattr(layer.module.impl, "kv_cache_dtype", None),
        )
        kinds.setdefault(kind, []).append(layer)
    for same in kinds.values():
        yield same[0]
        if len(same) > 1:
            yield same[-1]


def _bits(cache: torch.Tensor) -> torch.Tensor:
    """Bit patterns: so NaN equals itself and -0 is not 0."""
    return cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()])


def _awkward_placement(block_size: int, num_positions: int) -> Placement:
    """Whole lines, short ones at both ends, single tokens, jumps, a block's end and backwards."""
    # No slot twice: which of two tokens stays is up to the threads. Blocks have at least 16 slots.
    runs = [(5, block_size), (2 * block_size - 8, 17), (3 * block_size - 3, 1)]
    runs += [(3 * block_size - 5, 2)]
    slots = torch.cat([torch.arange(start, start + count) for start, count in runs])
    count = len(slots)
    rows = torch.arange(count).mul(37).remainder(_ROWS)
    positions = torch.arange(count).mul(max(1, num_positions // count)).remainder(num_positions)
    return Placement(rows, positions, slots)


def _written(
    writer: Writer, probes: Sequence[LayerTarget], placement: Placement
) -> list[torch.Tensor]:
    caches = []
    mirrors = []
    for probe in probes:
        cache = _scratch(probe.module.kv_cache)
        caches.append(cache)
        mirrors.append(LayerTarget(probe.index, _Mirror(probe.module, cache), 0))
    writer.write(mirrors, [placement])
    return caches


def _scratch(cache: torch.Tensor) -> torch.Tensor:
    """A cache of a few blocks with the same strides, filled with a number that nobody writes."""
    shape = (_BLOCKS, *cache.shape[1:])
    empty = torch.empty_strided(shape, cache.stride(), dtype=cache.dtype, device=cache.device)
    return empty.fill_(-123.0 if cache.is_floating_point() else 133)
