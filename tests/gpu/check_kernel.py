"""Checks and times the Triton kernel on a device, in the shape of Llama-3.1-8B.

    python tests/gpu/check_kernel.py                            # CUDA
    python tests/gpu/check_kernel.py --device cpu --small       # Triton's interpreter, one minute

It needs torch, numpy and triton. Where vLLM is installed too, the caches are written by the
``do_kv_cache_update`` of its FlashAttention backend and keys are turned by its own rotary module;
else plain torch takes their places. It prints a table and one line of JSON, and ends with 1 when
bytes are wrong, or when writing plain rows takes more than 2.5 times what the measured bandwidth
allows (read once, write once).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RUNTIME = str(Path(__file__).resolve().parents[2] / "runtime")
if RUNTIME not in sys.path:
    sys.path.insert(0, RUNTIME)

from inferscale_runtime.inject.check import SlabLayout, choose_writer  # noqa: E402
from inferscale_runtime.inject.triton_kernel import load_kernel  # noqa: E402
from inferscale_runtime.inject.writer import LayerTarget, Placement, PortableWriter  # noqa: E402
from inferscale_runtime.packing.rows import channel_exponents, pack  # noqa: E402

BLOCK, FACT_TOKENS, POSITIONS = 16, 30, 4096
MOST = 2.5
"""Times the bound that writing plain rows may take."""
KINDS = ("auto", "int8", "fp8")


@dataclass(frozen=True)
class Sizes:
    """Layers, KV heads, head size, tokens of a prompt, repeats."""

    layers: int = 32
    heads: int = 8
    head_dim: int = 128
    tokens: int = 1500
    repeats: int = 30


SMALL = Sizes(2, 2, 64, 40, 1)


@dataclass(frozen=True)
class Row:
    """One line of the table; ``bound_ms`` is what the measured bandwidth allows."""

    rows: str
    cache: str
    writer: str
    megabytes: float
    ms: float
    portable_ms: float
    bound_ms: float
    times_bound: float
    ok: bool
    note: str


class PlainRotary:
    """Rotates halves, each product rounded to the type of the keys."""

    is_neox_style = True

    def __init__(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        steps = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        angle = torch.arange(POSITIONS, dtype=torch.float64).unsqueeze(1) * 500_000.0**-steps
        self.cos_sin_cache = torch.cat([angle.cos(), angle.sin()], 1).to(device, dtype)

    def __call__(self, positions: Any, keys: torch.Tensor, _: None) -> tuple[torch.Tensor, None]:
        heads = keys.view(len(keys), -1, self.cos_sin_cache.shape[1])
        cosine, sine = self.cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)
        x, y = heads.chunk(2, -1)
        return torch.cat([x * cosine - y * sine, y * cosine + x * sine], -1).view(keys.shape), None


class Layer:
    """A layer with a cache ``[blocks, heads, block, 2 * head_dim]``, slots before heads."""

    def __init__(
        self, sizes: Sizes, blocks: int, kind: str, plain: torch.dtype, device: torch.device
    ) -> None:
        shape = (blocks, BLOCK, sizes.heads, 2 * sizes.head_dim)
        dtype = torch.uint8 if kind == "fp8" else plain
        self.kv_cache = torch.full(shape, 7, dtype=dtype, device=device).transpose(1, 2)
        self._k_scale = torch.tensor(0.5, device=device)
        self._v_scale = torch.tensor(0.25, device=device)
        self.impl: Any = _PlainImpl(sizes.head_dim, kind)


class _PlainImpl:
    def __init__(self, head_size: int, kind: str) -> None:
        self.head_size = head_size
        self.kv_cache_dtype = kind

    def do_kv_cache_update(
        self, layer: Any, keys: Any, values: Any, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        parts = cache.transpose(1, 2).split(self.head_size, dim=-1)
        scales = (layer._k_scale, layer._v_scale)
        for part, rows, scale in zip(parts, (keys, values), scales, strict=True):
            if self.kv_cache_dtype == "fp8":
                small = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                rows = small.view(torch.uint8)
            part[slots // BLOCK, slots % BLOCK] = rows


def vllm_parts(sizes: Sizes, device: torch.device) -> tuple[Callable[[str], Any], Any] | None:
    """vLLM's own cache writer and rotary module, or None where there are none."""
    if device.type != "cuda":
        return None
    try:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.rotary_embedding import get_rope
        from vllm.v1.attention.backend import AttentionType
        from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
    except ImportError:
        return None
    with set_current_vllm_config(VllmConfig()):
        rope = {"rope_type": "default", "rope_theta": 500_000.0}
        rotary = get_rope(sizes.head_dim, POSITIONS, rope_parameters=rope, dtype=torch.bfloat16)

    def impl(kind: str) -> Any:
        found = FlashAttentionImpl.__new__(FlashAttentionImpl)
        found.attn_type = AttentionType.DECODER
        found.head_size, found.kv_cache_dtype = sizes.head_dim, kind
        return found

    return impl, rotary.to(device)


class Check:
    """One start of the script."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        # The interpreter rounds bfloat16 and fp8 otherwise than a device does.
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        parts = vllm_parts(sizes, device)
        self.impl = parts[0] if parts else None
        self.rotary = parts[1] if parts else None
        if parts is None:
            self.rotary = PlainRotary(sizes.head_dim, self.dtype, device)
        self.kernel = None if device.type == "cuda" else load_kernel(interpret=True)
        generator = torch.Generator().manual_seed(1)
        count = 2 * sizes.tokens
        shape = (count, sizes.layers, 2, sizes.heads, sizes.head_dim)
        self.slab = torch.randn(shape, generator=generator).to(self.dtype)
        blocks = -(-sizes.tokens // BLOCK) + 3
        self.blocks = blocks
        starts = torch.randperm(count // FACT_TOKENS, generator=generator) * FACT_TOKENS
        rows = (starts[:, None] + torch.arange(FACT_TOKENS)).flatten()[: sizes.tokens]
        positions = torch.arange(len(rows)) + 40
        order = torch.randperm(blocks - 1, generator=generator) + 1
        index = torch.arange(len(rows))
        slots = order[index // BLOCK] * BLOCK + index % BLOCK
        self.place = Placement(rows, positions, slots).to(device)

    def ms(self, action: Callable[[], object]) -> float:
        times = []
        for _ in range(self.sizes.repeats + 1):
            self.wait()
            started = time.perf_counter()
            action()
            self.wait()
            times.append(1000 * (time.perf_counter() - started))
        return statistics.median(times[1:])

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def bytes_per_ms(self) -> float:
        """Bytes that a copy on the device moves, read and written ones together."""
        size = 1 << (22 if self.device.type == "cpu" else 29)
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.ms(lambda: target.copy_(source))

    def layers(self, kind: str) -> list[LayerTarget]:
        found = []
        for index in range(self.sizes.layers):
            layer = Layer(self.sizes, self.blocks, kind, self.dtype, self.device)
            if self.impl:
                layer.impl = self.impl(kind)
            found.append(LayerTarget(index, layer, 0))
        return found

    def row(self, kind: str, cache: str, rate: float) -> Row:
        """Writes one prompt and compares all caches with the portable writer's."""
        sizes, layers = self.sizes, self.layers(cache)
        heads = slice(0, sizes.heads)
        layout = SlabLayout(sizes.layers, sizes.heads, sizes.head_dim, self.dtype, heads, kind)
        slab, exponents = self.slab, None
        if kind != "auto":
            packed = pack(slab, kind, channel_exponents(slab))
            slab, exponents = packed.rows, packed.exponents
        slab = slab.to(self.device)
        choice = choose_writer("auto", layers, self.rotary, layout, kernel=self.kernel)
        writer = choice.open(slab, exponents)
        portable = PortableWriter(slab, heads, self.rotary, layout.unpacking(exponents))
        portable.write(layers, [self.place])
        expected = [layer.module.kv_cache.clone() for layer in layers]
        portable_ms = self.ms(lambda: portable.write(layers, [self.place]))
        for layer in layers:
            layer.module.kv_cache.fill_(7)
        ms = self.ms(lambda: writer.write(layers, [self.place]))
        same = all(
            torch.equal(layer.module.kv_cache, other)
            for layer, other in zip(layers, expected, strict=True)
        )
        tokens = len(self.place.rows)
        written = sum(layer.module.kv_cache[0, :, 0].nbytes for layer in layers) * tokens
        size = slab[0].nbytes * tokens + written
        bound = size / rate
        note = choice.reason or ("" if same else "bytes differ from the portable writer's")
        slow = self.device.type == "cuda" and (kind, cache) == ("auto", "auto")
        if slow and ms > MOST * bound:
            note = note or f"more than {MOST} times the bound"
        return Row(
            kind, cache, choice.name, size / 1e6, ms, portable_ms, bound, ms / bound, not note, note
        )


def table(rows: list[Row]) -> str:
    lines = [
        ("rows", "cache", "writer", "MB", "ms", "portable ms", "bound ms", "times", "right", "")
    ]
    for r in rows:
        figures = [f"{v:.3f}" for v in (r.megabytes, r.ms, r.portable_ms, r.bound_ms)]
        right = "yes" if r.ok else "NO"
        lines.append((r.rows, r.cache, r.writer, *figures, f"{r.times_bound:.2f}", right, r.note))
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks and times the Triton kernel on a device.")
    parser.add_argument("--device", default="cuda", help="torch device, such as cuda:1 or cpu")
    parser.add_argument("--small", action="store_true", help="sizes for a quick try")
    parser.add_argument("--json", type=Path, help="file for the JSON document too")
    parsed = parser.parse_args(arguments)
    device, sizes = torch.device(parsed.device), SMALL if parsed.small else Sizes()
    cuda = device.type == "cuda"
    if cuda and not torch.cuda.is_available():
        print(f"--device {parsed.device}: torch finds no CUDA device; try --device cpu --small")
        return 2
    check = Check(sizes, device)
    rate = check.bytes_per_ms()
    caches = ("auto", "fp8") if cuda else ("auto",)
    rows = [check.row(kind, cache, rate) for cache in caches for kind in KINDS]
    document = {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "torch": torch.__version__,
        "vllm": check.impl is not None,
        "copy_gb_per_s": round(rate / 1e6, 1),
        "sizes": asdict(sizes),
        "ok": all(r.ok for r in rows),
        "rows": [asdict(r) for r in rows],
    }
    print(f"{document['device']}, torch {torch.__version__}, {document['copy_gb_per_s']} GB/s")
    print(table(rows))
    print(json.dumps(document))
    if parsed.json:
        parsed.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
