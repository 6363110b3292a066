"""``inferscale bench encode``: the encoder's tokens per second beside the engine's own prefill.

Each side runs in a process of its own (``python -m inferscale_runtime.bench.prefill``), because one
process can hold one engine; the sides take turns. Both read the same token ids.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inferscale_runtime.bench.report import BenchError, Row
from inferscale_runtime.bench.server import say
from inferscale_runtime.children import environment
from inferscale_runtime.encode.engine import (
    EncodeEngine,
    EncodeRequest,
    keep_engine_in_this_process,
)

COLUMNS = (
    ("prompts", "prompts"),
    ("prompt_tokens", "tokens each"),
    ("kept_tokens", "kept of each"),
    ("prefill_tokens_per_s", "engine's prefill tokens/s"),
    ("encode_tokens_per_s", "encode tokens/s"),
    ("encode_per_prefill", "encode/prefill"),
)


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """What is read.

    Attributes:
        model: Model folder.
        dtype: vLLM dtype.
        prompts: Prompts of one pass.
        prompt_tokens: Tokens of each: context and fact.
        kept_tokens: How many of them are kept, the fact's.
        passes: Timed passes of one process, after one that is not timed.
        kv_cache_bytes: Size of the engine's cache.
        seed: Same seed, same tokens.
    """

    model: str
    dtype: str
    prompts: int
    prompt_tokens: int
    kept_tokens: int
    passes: int
    kv_cache_bytes: int
    seed: int


def measure(options: PrefillOptions, rounds: int) -> Row:
    """Lets both sides take turns and compares their medians."""
    seconds: dict[str, list[float]] = {"prefill": [], "encode": []}
    for turn in range(rounds):
        for side in ("prefill", "encode") if turn % 2 == 0 else ("encode", "prefill"):
            say(f"round {turn + 1} of {rounds}: {side}")
            seconds[side] += _run_side(side, options)
    tokens = options.prompts * options.prompt_tokens
    row: Row = {
        "prompts": options.prompts,
        "prompt_tokens": options.prompt_tokens,
        "kept_tokens": options.kept_tokens,
    }
    for side, times in seconds.items():
        row[f"{side}_tokens_per_s"] = round(tokens / statistics.median(times), 1)
        row[f"{side}_p50_s"] = round(statistics.median(times), 3)
        row[f"{side}_min_s"] = round(min(times), 3)
    row["encode_per_prefill"] = round(row["encode_tokens_per_s"] / row["prefill_tokens_per_s"], 3)
    return row


def _run_side(side: str, options: PrefillOptions) -> list[float]:
    fields = {name: getattr(options, name) for name in options.__slots__}
    result = subprocess.run(
        [sys.executable, "-P", "-m", __name__, side, json.dumps(fields)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = result.stdout.strip().splitlines()
    if result.returncode or not lines:
        raise BenchError(
            f"the engine for '{side}' ended with status {result.returncode}, see above"
        )
    times: list[float] = json.loads(lines[-1])
    return times


def token_ids(options: PrefillOptions, turn: int) -> list[tuple[int, ...]]:
    """Prompts that no other pass has, so that no prefix cache helps; low ids exist everywhere."""
    rng = random.Random(f"{options.seed}/{turn}")
    return [
        tuple(rng.randrange(100, 10_000) for _ in range(options.prompt_tokens))
        for _ in range(options.prompts)
    ]


def _time_passes(options: PrefillOptions, run: Callable[[list[tuple[int, ...]]], None]) -> None:
    times = []
    for turn in range(options.passes + 1):
        prompts = token_ids(options, turn)
        start = time.perf_counter()
        run(prompts)
        if turn:
            times.append(time.perf_counter() - start)
    print(json.dumps(times), flush=True)


def _encode_side(options: PrefillOptions) -> None:
    engine = EncodeEngine(
        options.model,
        options.dtype,
        options.prompt_tokens + 16,
        kv_cache_bytes=options.kv_cache_bytes,
    )

    def run(prompts: list[tuple[int, ...]]) -> None:
        kept: dict[str, Any] = {}
        engine.encode(
            [EncodeRequest(f"p{n}", ids, options.kept_tokens) for n, ids in enumerate(prompts)],
            lambda request, kv: kept.update({request.name: kv}),
        )
        if len(kept) != len(prompts):
            raise BenchError(f"{len(kept)} of {len(prompts)} prompts came back")

    _time_passes(options, run)
    engine.close()


def _prefill_side(options: PrefillOptions) -> None:
    keep_engine_in_this_process()
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=options.prompt_tokens + 16,
        distributed_executor_backend="uni",
        enable_prefix_caching=True,
        kv_cache_memory_bytes=options.kv_cache_bytes,
    )
    params = SamplingParams(max_tokens=1, temperature=0)

    def run(prompts: list[tuple[int, ...]]) -> None:
        llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)

    _time_passes(options, run)
    llm.llm_engine.engine_core.shutdown()


def main() -> None:
    """Runs one side and prints the seconds of its passes as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("prefill", "encode"))
    parser.add_argument("options")
    arguments = parser.parse_args()
    options = PrefillOptions(**json.loads(arguments.options))
    (_encode_side if arguments.side == "encode" else _prefill_side)(options)


if __name__ == "__main__":
    main()
