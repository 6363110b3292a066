"""``inferscale bench inject``: how fast stored rows get into the engine's cache.

A real engine is started in this process for its layers, caches and rotary module; the slab is a
shared-memory file as in the server, or lies on the GPU that the caches are on. The writers, over
plain and over quantised rows, and a plain copy of the bytes that they write take turns, so that all
see the same machine.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from inferscale_runtime.bench.report import BenchError, Row
from inferscale_runtime.encode.engine import keep_engine_in_this_process
from inferscale_runtime.inject.check import SlabLayout, Writer, choose_writer
from inferscale_runtime.inject.writer import LayerTarget, Placement
from inferscale_runtime.packing.rows import pack
from inferscale_runtime.tiers.slab import DTYPES, SlabShape, create_run_files, map_slab

COLUMNS = (
    ("tokens", "tokens"),
    ("megabytes", "MB"),
    ("portable_p50_ms", "portable ms"),
    ("native_p50_ms", "native ms"),
    ("triton_p50_ms", "triton ms"),
    ("int8_p50_ms", "int8 ms"),
    ("fp8_p50_ms", "fp8 ms"),
    ("memcpy_p50_ms", "memcpy ms"),
    ("native_gb_per_s", "native GB/s"),
    ("triton_gb_per_s", "triton GB/s"),
    ("int8_gb_per_s", "int8 GB/s"),
    ("fp8_gb_per_s", "fp8 GB/s"),
    ("memcpy_gb_per_s", "memcpy GB/s"),
    ("native_per_memcpy", "native/memcpy"),
    ("triton_per_memcpy", "triton/memcpy"),
)
QUANTISED = ("int8", "fp8")
FACT_TOKENS = 30


@dataclass(frozen=True, slots=True)
class Engine:
    """What the writers need of a running engine.

    Attributes:
        layers: Its layers with their caches.
        rotary: Its rotary module.
        layout: Layout of a slab for it.
        num_blocks: Blocks of its cache.
        block_size: Tokens in a block.
    """

    layers: list[LayerTarget]
    rotary: Any
    layout: SlabLayout
    num_blocks: int
    block_size: int


@contextmanager
def running_engine(model: str, dtype: str, kv_cache_bytes: int) -> Iterator[Engine]:
    """Starts vLLM in this process for as long as the block runs."""
    keep_engine_in_this_process()
    from vllm import LLM

    from inferscale_runtime.connector.support import attention_layers, rotary_module

    llm: Any = LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=kv_cache_bytes,
    )
    try:
        config = llm.llm_engine.vllm_config
        layers = [LayerTarget(n, m, 0) for n, (_, m) in enumerate(attention_layers(config))]
        model_config = config.model_config
        heads = int(model_config.get_total_num_kv_heads())
        size = int(model_config.get_head_size())
        layout = SlabLayout(len(layers), heads, size, model_config.dtype, slice(0, heads))
        yield Engine(
            layers,
            rotary_module(config),
            layout,
            int(layers[0].module.kv_cache.shape[0]),
            int(config.cache_config.block_size),
        )
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def random_slab(layout: SlabLayout, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A slab in shared memory, filled with random rows, and the exponents of quantised ones."""
    dtype = next(name for name, value in DTYPES.items() if value == layout.dtype)
    shape = SlabShape(
        rows, layout.num_layers, layout.num_kv_heads, layout.head_dim, dtype, layout.kv_dtype
    )
    plain = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    generator = torch.Generator().manual_seed(0)
    exponents = torch.zeros((plain[0], *plain[2:]), dtype=torch.int8)
    with tempfile.TemporaryDirectory(prefix="inferscale-bench-", dir="/dev/shm") as name:
        create_run_files(Path(name), shape)
        slab = map_slab(Path(name), shape)
        for first in range(0, rows, 64):
            part = slab[first : first + 64]
            values = torch.randn((len(part), *plain), generator=generator)
            if shape.packed:
                values = pack(values, layout.kv_dtype, exponents).rows
            part.copy_(values)
        yield slab, exponents


def place_tokens(tokens: int, rows: int, num_blocks: int, block_size: int, seed: int) -> Placement:
    """Places a prompt: facts that lie anywhere in the slab, blocks that lie anywhere in the cache.

    Args:
        tokens: Prompt tokens to inject.
        rows: Rows of the slab.
        num_blocks: Blocks of the cache; block 0 is vLLM's null block.
        block_size: Tokens in a block.
        seed: Same seed, same places.

    Raises:
        BenchError: The cache or the slab is too small.
    """
    needed = -(-tokens // block_size)
    if needed >= num_blocks or rows < tokens + FACT_TOKENS:
        raise BenchError(
            f"--tokens {tokens}: the cache holds {(num_blocks - 1) * block_size}; "
            "raise --kv-cache-bytes"
        )
    rng = random.Random(seed)
    facts = range(0, rows - FACT_TOKENS + 1, FACT_TOKENS)
    starts = torch.tensor(rng.sample(facts, -(-tokens // FACT_TOKENS)))
    chosen = (starts[:, None] + torch.arange(FACT_TOKENS)).flatten()[:tokens]
    blocks = torch.tensor(rng.sample(range(1, num_blocks), needed))
    positions = torch.arange(tokens)
    slots = blocks[positions // block_size] * block_size + positions % block_size
    return Placement(chosen, positions, slots)


def measure(
    engine: Engine, counts: Sequence[int], repeats: int, seed: int
) -> tuple[list[Row], str]:
    """Measures all token counts.

    Returns:
        One row for each count, and why there is no faster writer, or empty.
    """
    device = engine.layers[0].module.kv_cache.device
    rows = 2 * max(counts) + 2 * FACT_TOKENS
    writers: dict[str, Writer] = {}
    reason = ""
    with ExitStack() as stack:
        for kind in ("auto", *QUANTISED):
            layout = replace(engine.layout, kv_dtype=kind)
            choice = choose_writer("auto", engine.layers, engine.rotary, layout)
            slab, exponents = stack.enter_context(random_slab(layout, rows))
            slab = slab.to(device)
            if kind == "auto":
                reason = choice.reason
                portable = choose_writer("portable", engine.layers, engine.rotary, layout)
                writers["portable"] = portable.open(slab, None)
            if not choice.reason:
                writers[choice.name if kind == "auto" else kind] = choice.open(slab, exponents)
        results = []
        shape = (engine.layout.num_layers, 2, engine.layout.num_kv_heads, engine.layout.head_dim)
        for tokens in counts:
            placement = place_tokens(tokens, rows, engine.num_blocks, engine.block_size, seed)
            source = torch.rand((tokens, *shape)).to(engine.layout.dtype).to(device)
            times = _take_turns(engine, source, writers, placement.to(device), repeats)
            results.append(_row(tokens, source.nbytes, times))
    return results, reason


def _take_turns(
    engine: Engine,
    source: torch.Tensor,
    writers: dict[str, Writer],
    placement: Placement,
    repeats: int,
) -> dict[str, list[float]]:
    target = torch.empty_like(source)
    cuda = source.device.type == "cuda"

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    def job(writer: Writer) -> Callable[[], object]:
        return lambda: writer.write(engine.layers, [placement])

    jobs: dict[str, Callable[[], object]] = {name: job(w) for name, w in writers.items()}
    jobs["memcpy"] = lambda: target.copy_(source)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, run in jobs.items():
            wait()
            start = time.perf_counter()
            run()
            wait()
            if turn:  # the first turn is the warm-up
                times[name].append(time.perf_counter() - start)
    return times


def _row(tokens: int, size: int, times: dict[str, list[float]]) -> Row:
    row: Row = {"tokens": tokens, "megabytes": round(size / 1e6, 2)}
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        row[f"{name}_p50_ms"] = round(middle * 1e3, 3)
        row[f"{name}_min_ms"] = round(min(seconds) * 1e3, 3)
        row[f"{name}_gb_per_s"] = round(size / middle / 1e9, 3)
    for name in times.keys() - {"memcpy"}:
        share = row[f"{name}_gb_per_s"] / row["memcpy_gb_per_s"]
        row[f"{name}_per_memcpy"] = round(share, 3)
    return row
