"""Checks and times the GPU arena and the portable writer on a device, without an engine.

    python tests/gpu/check_tiers.py                        # CUDA, shape of Llama-3.1-8B
    python tests/gpu/check_tiers.py --device cpu --small   # the same code in a second

It needs torch and numpy alone. It prints a table and one line of JSON, and ends with 1 when bytes
are wrong or the slab could not be pinned. Layers and rotation are plain torch: what is checked is
our side (gather, positions, slots, streams), against a reference in float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

RUNTIME = str(Path(__file__).resolve().parents[2] / "runtime")
if RUNTIME not in sys.path:
    sys.path.insert(0, RUNTIME)

from inferscale_runtime.inject.writer import LayerTarget, Placement, PortableWriter  # noqa: E402
from inferscale_runtime.tiers.device_arena import DeviceArena, Run, pin_slab  # noqa: E402
from inferscale_runtime.tiers.slab import (  # noqa: E402
    SlabShape,
    create_run_files,
    map_slab,
    map_stamps,
)

BLOCK, FACT_TOKENS, FIRST_POSITION, EMPTY = 16, 30, 40, -7.0
THETA = 500_000.0


@dataclass(frozen=True)
class Sizes:
    """What is measured: layers, KV heads, head size, tokens of a prompt, bytes of a compose."""

    layers: int = 32
    heads: int = 8
    head_dim: int = 128
    tokens: int = 1500
    compose_bytes: int = 200_000_000
    repeats: int = 20

    @property
    def row_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.head_dim * 2

    @property
    def compose_rows(self) -> int:
        return self.compose_bytes // self.row_bytes


SMALL = Sizes(3, 2, 32, 150, 200_000, 3)


@dataclass(frozen=True)
class Row:
    """One line of the table; ``bound_ms`` is what the measured bandwidth allows."""

    check: str
    megabytes: float
    ms: float
    gb_per_s: float
    bound_ms: float
    ok: bool
    note: str = ""


class Rotary:
    """Rotates halves, in float32, angles from a table."""

    def __init__(self, positions: int, head_dim: int, device: torch.device) -> None:
        self._dim = head_dim
        cosine, sine = angles(torch.arange(positions), head_dim)
        self._cosine, self._sine = cosine.float().to(device), sine.float().to(device)

    def __call__(self, positions: torch.Tensor, keys: torch.Tensor, _: None) -> tuple[Any, None]:
        x, y = keys.view(len(keys), -1, self._dim).float().chunk(2, -1)
        cosine, sine = self._cosine[positions].unsqueeze(1), self._sine[positions].unsqueeze(1)
        rotated = torch.cat([x * cosine - y * sine, y * cosine + x * sine], -1)
        return rotated.to(keys.dtype).view(keys.shape), None


class Layer:
    """A layer with a paged cache, ``[2, blocks, block, heads, head_dim]``."""

    def __init__(self, sizes: Sizes, blocks: int, device: torch.device) -> None:
        self.impl = self
        shape = (2, blocks, BLOCK, sizes.heads, sizes.head_dim)
        self.kv_cache = torch.full(shape, EMPTY, dtype=torch.bfloat16, device=device)

    def do_kv_cache_update(self, _: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        for part, rows in zip(cache.flatten(1, 2), (keys, values), strict=True):
            part.index_copy_(0, slots, rows)


def angles(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines in float64, ``[positions, head_dim / 2]``."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angle = positions.double().unsqueeze(1) * THETA**-steps
    return angle.cos(), angle.sin()


class Clock:
    """Median time of an action, the device's queue included."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device, self._repeats = device, repeats

    def ready(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def ms(self, action: Callable[[], object]) -> float:
        times = []
        action()
        for _ in range(self._repeats):
            self.ready()
            started = time.perf_counter()
            action()
            self.ready()
            times.append(1000 * (time.perf_counter() - started))
        return statistics.median(times)


class Check:
    """Slab, runs and device of one start of the script."""

    def __init__(self, sizes: Sizes, device: torch.device, folder: Path) -> None:
        self.sizes, self.device = sizes, device
        self.clock = Clock(device, sizes.repeats)
        needed = max(sizes.compose_rows, sizes.tokens)
        shape = SlabShape(
            needed + FACT_TOKENS, sizes.layers, sizes.heads, sizes.head_dim, "bfloat16"
        )
        create_run_files(folder, shape)
        self.slab, self.stamps = map_slab(folder, shape), map_stamps(folder, shape)
        generator = torch.Generator().manual_seed(1)
        for part in self.slab.split(64):
            part.copy_(torch.randn(part.shape, generator=generator))
        self.stamps[::FACT_TOKENS] = range(1, len(self.stamps[::FACT_TOKENS]) + 1)
        self.pinned = False

    def runs(self, rows: int) -> list[Run]:
        """Facts in an order that is not the slab's."""
        starts = list(range(0, rows, FACT_TOKENS))
        order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(2))
        chosen = [starts[n] for n in order]
        return [(start, min(FACT_TOKENS, rows - start)) for start in chosen]

    def arena(self, heads: slice, rows: int) -> DeviceArena:
        one = self.slab[:1, :, :, heads]
        budget = rows * one.numel() * one.element_size()
        return DeviceArena(self.slab, self.stamps, heads, budget, self.device)

    def expected(self, runs: list[Run], heads: slice = slice(None)) -> torch.Tensor:
        return torch.cat([self.slab[start : start + rows, :, :, heads] for start, rows in runs])

    def compose(self, name: str, heads: slice, rows: int, bound: float) -> Row:
        """Facts of one prompt onto the device; with room for ``rows``, they are there before."""
        arena, runs = self.arena(heads, rows), self.runs(self.sizes.compose_rows)
        expected = self.expected(runs, heads)
        ok = all(torch.equal(arena.fetch(runs).cpu(), expected) for _ in range(2))
        ms = self.clock.ms(lambda: arena.fetch(runs))
        hits = arena.figures.hits > 0
        note = "" if hits == (rows > 0) else "copies were not used as planned"
        return row(name, expected.nbytes, ms, bound, ok and not note, note)

    def rows(self) -> list[Row]:
        """All measurements."""
        size = self.sizes.compose_rows * self.sizes.row_bytes
        copied = self.copy_ms(size)
        moved = self.device_copy_ms(size)
        everything, half = slice(None), slice(0, self.sizes.heads // 2)
        found = [
            row("plain copy to the device", size, copied, copied, True),
            row("plain copy on the device", size, moved, moved, True),
            self.compose("compose, slab not pinned", everything, 0, copied),
        ]
        self.pinned = pin_slab(self.slab)
        cuda = self.device.type == "cuda"
        pinned = self.compose("compose, slab pinned", everything, 0, copied)
        if not self.pinned:
            note = "the slab could not be pinned" if cuda else "nothing is pinned without CUDA"
            pinned = replace(pinned, ok=pinned.ok and not cuda, note=note)
        found.append(pinned)
        found.append(self.compose("compose, half of the heads", half, 0, copied / 2))
        rows = int(self.slab.shape[0])
        found.append(self.compose("compose, all on the device", everything, rows, moved))
        return [*found, self.write(moved / size)]

    def copy_ms(self, size: int) -> float:
        source = torch.empty(size, dtype=torch.uint8)
        if self.device.type == "cuda":
            source = source.pin_memory()
        target = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self.clock.ms(lambda: target.copy_(source, non_blocking=True))

    def device_copy_ms(self, size: int) -> float:
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return self.clock.ms(lambda: target.copy_(source))

    def write(self, copy_ms_per_byte: float) -> Row:
        """Rotates and scatters one prompt's rows, which are on the device, into every layer."""
        sizes, device, runs = self.sizes, self.device, self.runs(self.sizes.tokens)
        blocks = -(-sizes.tokens // BLOCK) + 3
        layers = [LayerTarget(n, Layer(sizes, blocks, device), 0) for n in range(sizes.layers)]
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(3))
        positions = torch.arange(FIRST_POSITION, FIRST_POSITION + sizes.tokens)
        index = torch.arange(sizes.tokens)
        slots = order[index // BLOCK] * BLOCK + index % BLOCK
        rotary = Rotary(FIRST_POSITION + sizes.tokens, sizes.head_dim, device)
        brought = self.arena(slice(None), sizes.tokens + FACT_TOKENS).fetch(runs)
        writer = PortableWriter(brought, slice(None), rotary)
        placed = [Placement(index.to(device), positions.to(device), slots.to(device))]
        ms = self.clock.ms(lambda: writer.write(layers, placed))
        worst, problem = self.compare(layers, self.expected(runs), positions, slots)
        note = problem or f"largest error {worst:.2g} of the allowed one"
        size = sizes.tokens * sizes.row_bytes
        return row("rotate and scatter", size, ms, size * copy_ms_per_byte, not problem, note)

    def compare(
        self,
        layers: list[LayerTarget],
        stored: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> tuple[float, str]:
        """Against float64: half a unit in the last place of bfloat16, and float32's rounding."""
        cosine, sine = (part.unsqueeze(1) for part in angles(positions, self.sizes.head_dim))
        worst = 0.0
        for layer in layers:
            cache = layer.module.kv_cache.cpu().flatten(1, 2)
            x, y = stored[:, layer.index, 0].double().chunk(2, -1)
            exact = torch.cat([x * cosine - y * sine, y * cosine + x * sine], -1)
            size = torch.cat([x.abs() + y.abs()] * 2, -1)
            error = (cache[0, slots].double() - exact).abs()
            allowed = exact.abs() * 2.0**-8 * 1.01 + size * 1e-6
            worst = max(worst, float((error / allowed).max()))
            if worst > 1:
                return worst, f"layer {layer.index}: keys differ from the reference"
            if not torch.equal(cache[1, slots], stored[:, layer.index, 1]):
                return worst, f"layer {layer.index}: values differ"
            free = torch.ones(cache.shape[1], dtype=torch.bool)
            free[slots] = False
            if not bool((cache[:, free] == EMPTY).all()):
                return worst, f"layer {layer.index}: slots of others were written"
        return worst, ""


def row(check: str, size: int, ms: float, bound_ms: float, ok: bool, note: str = "") -> Row:
    return Row(check, size / 1e6, ms, size / 1e6 / ms, bound_ms, ok, note)


def table(rows: list[Row]) -> str:
    lines = [("check", "MB", "ms", "GB/s", "bound ms", "times bound", "right", "")]
    for r in rows:
        figures = [f"{v:.2f}" for v in (r.megabytes, r.ms, r.gb_per_s)]
        bound = [f"{r.bound_ms:.3f}", f"{r.ms / r.bound_ms:.2f}"]
        lines.append((r.check, *figures, *bound, "yes" if r.ok else "NO", r.note))
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(size) if n in (0, 7) else cell.rjust(size)
            for n, (cell, size) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks and times the GPU arena on a device.")
    parser.add_argument("--device", default="cuda", help="torch device, such as cuda:1 or cpu")
    parser.add_argument("--small", action="store_true", help="sizes for a quick try")
    parser.add_argument("--run-root", default="/dev/shm", help="tmpfs folder for the slab")
    parser.add_argument("--json", type=Path, help="file for the JSON document too")
    parsed = parser.parse_args(arguments)
    device, sizes = torch.device(parsed.device), SMALL if parsed.small else Sizes()
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"--device {parsed.device}: torch finds no CUDA device; try --device cpu --small")
        return 2
    with tempfile.TemporaryDirectory(dir=parsed.run_root) as folder:
        check = Check(sizes, device, Path(folder))
        rows = check.rows()
    cuda = device.type == "cuda"
    document = {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "torch": torch.__version__,
        "pinned": check.pinned,
        "sizes": asdict(sizes),
        "ok": all(r.ok for r in rows),
        "rows": [asdict(r) for r in rows],
    }
    print(f"{document['device']}, torch {torch.__version__}\n{table(rows)}")
    print(json.dumps(document))
    if parsed.json:
        parsed.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
