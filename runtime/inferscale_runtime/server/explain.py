"""``inferscale serve --explain-budget``: prints how the memory would be divided, starts nothing."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from inferscale_runtime.budget import (
    BudgetError,
    BudgetRequest,
    BudgetRow,
    compute_budget,
    format_quantity,
    format_rows,
    model_shape,
    parse_quantity,
)
from inferscale_runtime.config import RuntimeConfig, load_config
from inferscale_runtime.encode.model import resolve_model
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.nvml import NvmlSampler

_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_SCALE = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "": 1}


def add_arguments(serve: argparse.ArgumentParser) -> None:
    """Adds the flags of the explanation to ``inferscale serve``."""
    serve.add_argument(
        "--explain-budget",
        action="store_true",
        help="print how GPU and host memory would be divided, and exit (2 when it cannot fit)",
    )
    serve.add_argument(
        "--gpu-memory-bytes",
        help="with --explain-budget: memory of one GPU, for example 80Gi; 0 for none; "
        "asked from the driver when absent",
    )
    serve.add_argument(
        "--gpu-arena", help="with --explain-budget: auto or a quantity; tiers.gpu_bytes when absent"
    )


def explain_budget(arguments: argparse.Namespace) -> int:
    """Prints the table.

    Args:
        arguments: Of ``inferscale serve``; vLLM's own are read as far as they matter here.

    Returns:
        0.

    Raises:
        BudgetError: When it cannot fit; the terms so far are printed.
    """
    total, source = _gpu_total(arguments.gpu_memory_bytes)
    config = RuntimeConfig()
    if arguments.config:
        try:
            config = load_config(Path(arguments.config).read_text(), arguments.config)
        except OSError as error:
            raise ConfigError(f"--config '{arguments.config}': {error.strerror}") from error
    request = build_request(
        arguments, config, Path(resolve_model(arguments.model, arguments.revision)), total
    )
    print(f"model {arguments.model}, {source}")
    try:
        budget = compute_budget(request)
    except BudgetError as error:
        print(format_rows([row for row in error.rows if isinstance(row, BudgetRow)]))
        raise
    print(format_rows(budget.rows))
    if budget.gpu_memory_utilization is None:
        print(f"\n--kv-cache-memory-bytes {budget.kv_pool_bytes}")
    else:
        print(f"\n--gpu-memory-utilization {budget.gpu_memory_utilization}")
        print(f"GPU arena {format_quantity(budget.gpu_arena_bytes)} per GPU")
    print(f"KV pool {budget.kv_pool_tokens} tokens")
    print(f"/dev/shm {format_quantity(budget.shm_bytes)}")
    print(f"pod memory {format_quantity(budget.pod_memory_bytes)}")
    return 0


def build_request(
    arguments: argparse.Namespace, config: RuntimeConfig, folder: Path, gpu_total: int | None
) -> BudgetRequest:
    """From the command line and the model's folder to the calculation's input.

    Raises:
        ConfigError: Naming the flag or file.
    """
    try:
        document: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model file '{folder / 'config.json'}': {error}") from error
    weights = _weight_bytes(folder)
    engine = _engine_arguments(arguments.vllm_args)
    text = {**document, **(document.get("text_config") or {})}
    length = _whole(engine.max_model_len or str(text.get("max_position_embeddings", "")))
    return BudgetRequest(
        model=model_shape(
            document, weight_bytes=weights, kv_dtype_bytes=_kv_element(arguments.dtype, engine)
        ),
        gpu_total_bytes=gpu_total,
        tensor_parallel_size=engine.tensor_parallel_size,
        max_model_len=length,
        target_seqs=engine.max_num_seqs or 1,
        block_size=engine.block_size or (16 if gpu_total else 128),
        gpu_arena=_arena(arguments.gpu_arena, config),
        dram_tier_bytes=arguments.dram_bytes or config.tiers.dram_bytes,
    )


def _engine_arguments(vllm_args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--max-model-len")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--kv-cache-dtype", default="auto")
    return parser.parse_known_args([a for a in vllm_args if a != "--"])[0]


def _whole(text: str) -> int:
    """A token count as vLLM writes it: ``8192``, ``8k`` (8000) or ``8K`` (8192)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmgKMG]?)", text)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--max-model-len '{text}': give a number of tokens, for example 8192")
    return int(float(match[1]) * _SCALE[match[2]])


def _kv_element(dtype: str, engine: argparse.Namespace) -> int | None:
    if engine.kv_cache_dtype.startswith(("fp8", "int8")):
        return 1
    return _DTYPE_BYTES.get(engine.kv_cache_dtype) or _DTYPE_BYTES.get(dtype)


def _arena(text: str | None, config: RuntimeConfig) -> int | Literal["auto"]:
    if text is None:
        return config.tiers.gpu_bytes
    return "auto" if text == "auto" else parse_quantity(text)


def _weight_bytes(folder: Path) -> int:
    for pattern in _WEIGHTS:
        if size := sum(path.stat().st_size for path in folder.glob(pattern)):
            return size
    raise ConfigError(f"--model '{folder}': the folder holds no weights ({', '.join(_WEIGHTS)})")


def _gpu_total(text: str | None) -> tuple[int | None, str]:
    if text is not None:
        total = parse_quantity(text)
        return (total or None), f"GPU memory as given: {text}"
    sample = NvmlSampler().sample()
    sizes = [device.total_bytes for device in sample.devices if device.total_bytes]
    if not sizes:
        return None, f"no GPU ({sample.reason or 'the driver lists none with a memory size'})"
    return min(sizes), f"GPU memory from the driver ({sample.devices[0].name})"
