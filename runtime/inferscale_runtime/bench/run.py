"""Runs the benchmarks: from checked arguments to a published report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inferscale_runtime.bench import session, throughput, ttft
from inferscale_runtime.bench.cli import DEFAULT_MODEL, parse_modes
from inferscale_runtime.bench.client import Ask, ChatClient
from inferscale_runtime.bench.report import BenchError, Curve, Report, Row, draw, publish
from inferscale_runtime.bench.server import (
    ServerOptions,
    bench_server,
    encode_workload,
    find_log_line,
    say,
)
from inferscale_runtime.bench.workload import Workload, synthetic_workload
from inferscale_runtime.errors import ConfigError

# Eager saves minutes of compilation at start, and both modes run the same kernels. A fixed cache
# size keeps vLLM from reserving most of a laptop's memory.
VLLM_ARGS = ("--enforce-eager", "--kv-cache-memory-bytes", str(1 << 30))
ARENA_HEADROOM = 1.3


def model_folder(arguments: argparse.Namespace) -> str:
    """The model of ``--model``, or the small one, made when it is not there."""
    if arguments.model is not None:
        return str(arguments.model)
    from inferscale_runtime.encode.builtin import build_smollm2

    return str(build_smollm2(DEFAULT_MODEL))


def load_workload(arguments: argparse.Namespace, facts: int, questions: int) -> Workload:
    """The work of ``--data``, or synthetic work.

    Raises:
        ConfigError: The data set has too little for what is asked.
    """
    if arguments.data is None:
        return synthetic_workload(arguments.seed, arguments.users, facts, questions)
    from inferscale_runtime.encode.locomo import convert

    lines = list(convert(str(arguments.data)))
    asked = locomo_questions(json.loads(arguments.data.read_text(encoding="utf-8")))
    users = [user for user in dict.fromkeys(line["user"] for line in lines) if asked.get(user)]
    users = users[: arguments.users]
    if len(users) < arguments.users:
        raise ConfigError(
            f"--users {arguments.users}: '{arguments.data}' has {len(users)} conversations"
        )
    short = [user for user in users if len(asked[user]) < questions]
    if short:
        raise ConfigError(
            f"'{arguments.data}' has {len(asked[short[0]])} questions for {short[0]}, "
            f"{questions} are needed; lower --repeats or raise --users"
        )
    return Workload([line for line in lines if line["user"] in users], users, asked)


def locomo_questions(document: Any) -> dict[str, list[str]]:
    """Questions of each conversation of a LoCoMo document."""
    return {
        conversation["sample_id"]: [str(entry["question"]) for entry in conversation["qa"]]
        for conversation in document
    }


@contextlib.contextmanager
def serving(arguments: argparse.Namespace, workload: Workload, model: str) -> Iterator[str]:
    """The URL of a server that knows the work: a new one, or that of ``--url``."""
    if arguments.url:
        say("a server of yours is measured: its store must hold the users of this work")
        yield arguments.url.rstrip("/")
        return
    workdir: Path = arguments.workdir
    workdir.mkdir(parents=True, exist_ok=True)
    given = arguments.vllm_args[1:] if arguments.vllm_args[:1] == ["--"] else arguments.vllm_args
    options = ServerOptions(
        model,
        arguments.dtype,
        workdir,
        arguments.server_log or workdir / "server.log",
        arguments.policy,
        arguments.dram_bytes or 1 << 30,
        (*VLLM_ARGS, *given),
    )
    encode_workload(options, workload)
    if arguments.dram_bytes is None:
        options = _fit_arena(options)
    say("starting the server")
    with bench_server(options) as url:
        say(find_log_line(options.log, "inject: the") or "the server's log names no writer")
        yield url


def _fit_arena(options: ServerOptions) -> ServerOptions:
    """An arena that holds the whole store, so that `warm` means what it says."""
    from dataclasses import replace

    size = sum(file.stat().st_size for file in (options.workdir / "store").rglob("*.safetensors"))
    return replace(options, dram_bytes=max(1 << 28, int(size * ARENA_HEADROOM)))


def _check_serving(arguments: argparse.Namespace, facts: int, k: int) -> None:
    if arguments.facts is not None and arguments.facts < k:
        raise ConfigError(f"--facts {facts}: fewer than k ({k})")
    if arguments.url and arguments.vllm_args:
        raise ConfigError("--url: vLLM arguments are for a server that is started here")
    if arguments.api_key_file and not arguments.url:
        raise ConfigError("--api-key-file: a server that is started here needs none")


def _key(arguments: argparse.Namespace) -> str:
    if not arguments.api_key_file:
        return ""
    try:
        return Path(arguments.api_key_file).read_text().strip()
    except OSError as error:
        raise ConfigError(f"--api-key-file '{arguments.api_key_file}': {error.strerror}") from error


def run_ttft(arguments: argparse.Namespace) -> None:
    """``inferscale bench ttft``."""
    largest = max(arguments.k)
    facts = arguments.facts or largest
    _check_serving(arguments, facts, largest)
    each = -(-arguments.repeats // arguments.users) * len(arguments.k)
    workload = load_workload(arguments, facts, each)
    model = model_folder(arguments)
    report = Report(
        "ttft", model, arguments.seed, _settings(arguments), _shown(ttft.COLUMNS, arguments)
    )
    with contextlib.ExitStack() as stack:
        extra = None
        if arguments.baseline == "mem0":
            from inferscale_runtime.bench.mem0 import Mem0Baseline, mem0_problem

            problem = mem0_problem()
            if problem:
                report.notes.append(f"mem0: left out, {problem}")
                say(report.notes[-1])
            else:
                extra = stack.enter_context(Mem0Baseline(arguments.workdir, workload)).ask
        url = stack.enter_context(serving(arguments, workload, model))

        async def run() -> list[Row]:
            async with ChatClient(url, key=_key(arguments)) as client:
                await ttft.warm_up(client, workload, arguments.k)
                return await ttft.measure(client, workload, arguments.k, arguments.repeats, extra)

        report.rows = asyncio.run(run())
    report.notes.append(ttft.growth_note(report.rows))
    publish(report, arguments.json)
    if arguments.plot:
        names = [
            n for n in ("text", "injected", "floor", "mem0") if f"{n}_p50_ms" in report.rows[0]
        ]
        curves = [Curve(n, [(r["k"], r[f"{n}_p50_ms"]) for r in report.rows]) for n in names]
        draw(arguments.plot, "Time to first token", ("facts (k)", "ms, median"), curves)


def run_session(arguments: argparse.Namespace) -> None:
    """``inferscale bench session``."""
    _check_serving(arguments, arguments.facts, arguments.k)
    single = load_workload(arguments, arguments.facts, arguments.turns)
    workload = session.one_user_a_chat(single, arguments.users)
    model = model_folder(arguments)
    report = Report("session", model, arguments.seed, _settings(arguments), session.COLUMNS)
    if not arguments.url:
        # Otherwise vLLM does not tell how many tokens it had to compute.
        arguments.vllm_args = [*arguments.vllm_args, "--enable-prompt-tokens-details"]
    with serving(arguments, workload, model) as url:

        async def run() -> list[Row]:
            async with ChatClient(url, key=_key(arguments)) as client:
                await ttft.warm_up(client, workload, [arguments.k])
                users = single.users[: arguments.users]
                return await session.measure(
                    client, users, workload, arguments.turns, arguments.k, arguments.max_tokens
                )

        report.rows = asyncio.run(run())
    report.notes.append(session.later_note(report.rows))
    publish(report, arguments.json)
    if arguments.plot:
        curves = [
            Curve(way, [(r["turn"], r[f"{way}_p50_ms"]) for r in report.rows])
            for way, _ in session.WAYS
        ]
        draw(arguments.plot, "Turns of a chat", ("turn", "ms to first token, median"), curves)


def _shown(
    columns: Sequence[tuple[str, str]], arguments: argparse.Namespace
) -> list[tuple[str, str]]:
    return [c for c in columns if not c[0].startswith("mem0") or arguments.baseline == "mem0"]


def run_throughput(arguments: argparse.Namespace) -> None:
    """``inferscale bench throughput``."""
    facts = arguments.facts or arguments.k
    _check_serving(arguments, facts, arguments.k)
    modes = parse_modes(arguments.modes)
    most = max(arguments.concurrency)
    if arguments.rate is None and most > arguments.users:
        raise ConfigError(
            f"--concurrency {most}: more than --users {arguments.users}; open requests belong to "
            "different users"
        )
    workload = load_workload(arguments, facts, 4)
    model = model_folder(arguments)
    loads = plan_loads(modes, arguments.concurrency, arguments.requests, arguments.rate)
    template = Ask("", "", arguments.k, "injected", arguments.max_tokens)
    report = Report("throughput", model, arguments.seed, _settings(arguments), throughput.COLUMNS)
    with serving(arguments, workload, model) as url:

        async def run() -> None:
            async with ChatClient(url, max(most, arguments.users), _key(arguments)) as client:
                warm = False
                for number, load in enumerate(loads):
                    if load.state == "warm" and not warm:
                        await ttft.warm_up(client, workload, [arguments.k])
                        warm = True
                    seed = arguments.seed + number // len(modes)
                    report.rows.append(
                        await throughput.measure(
                            client, workload, load, template, arguments.zipf, seed
                        )
                    )

        asyncio.run(run())
    publish(report, arguments.json)
    if arguments.plot:
        draw(
            arguments.plot,
            f"Queries per second, k={arguments.k}",
            ("users at once", "queries/s"),
            [Curve(mode, _curve(report.rows, mode)) for mode in modes],
        )


def _curve(rows: Sequence[Row], mode: str) -> list[tuple[float, float]]:
    chosen = [row for row in rows if row["mode"] == mode and row["state"] == "warm"]
    return [(row["concurrency"], row["queries_per_s"]) for row in chosen]


def plan_loads(
    modes: Sequence[str], concurrency: Sequence[int], requests: int | None, rate: float | None
) -> list[throughput.Load]:
    """The rows to measure: the cold one first, as nothing is cold after it."""

    def count(clients: int) -> int:
        return requests or max(10, 2 * clients)

    most = max(concurrency)
    loads = []
    if "injected" in modes:
        loads.append(throughput.Load("injected", "cold", most, count(most), rate))
    levels = [most] if rate is not None else concurrency
    for clients in levels:
        loads += [throughput.Load(m, "warm", clients, count(clients), rate) for m in modes]
    return loads


def run_encode(arguments: argparse.Namespace) -> None:
    """``inferscale bench encode``."""
    from inferscale_runtime.bench import prefill

    if arguments.kept_tokens >= min(arguments.prompt_tokens):
        raise ConfigError(
            f"--kept-tokens {arguments.kept_tokens}: must be less than --prompt-tokens"
        )
    model = model_folder(arguments)
    report = Report("encode", model, arguments.seed, _settings(arguments), prefill.COLUMNS)
    for tokens in arguments.prompt_tokens:
        options = prefill.PrefillOptions(
            model,
            arguments.dtype,
            arguments.prompts,
            tokens,
            arguments.kept_tokens,
            arguments.passes,
            arguments.kv_cache_bytes,
            arguments.seed,
        )
        report.rows.append(prefill.measure(options, arguments.rounds))
    publish(report, arguments.json)
    if arguments.plot:
        curves = [
            Curve(side, [(r["prompt_tokens"], r[f"{side}_tokens_per_s"]) for r in report.rows])
            for side in ("prefill", "encode")
        ]
        draw(arguments.plot, "Encoding", ("tokens of a prompt", "tokens/s"), curves)


def run_inject(arguments: argparse.Namespace) -> None:
    """``inferscale bench inject``."""
    from inferscale_runtime.bench import inject

    model = model_folder(arguments)
    report = Report("inject", model, arguments.seed, _settings(arguments), inject.COLUMNS)
    with inject.running_engine(model, arguments.dtype, arguments.kv_cache_bytes) as engine:
        report.rows, reason = inject.measure(
            engine, arguments.tokens, arguments.repeats, arguments.seed
        )
    if reason:
        report.notes.append(f"no faster writer: {reason}")
    report.columns = tuple(column for column in report.columns if column[0] in report.rows[0])
    publish(report, arguments.json)
    if arguments.plot:
        names = ("portable", "native", "triton", *inject.QUANTISED, "memcpy")
        shown = [name for name in names if f"{name}_gb_per_s" in report.rows[0]]
        curves = [Curve(n, [(r["tokens"], r[f"{n}_gb_per_s"]) for r in report.rows]) for n in shown]
        draw(arguments.plot, "Writing KV into the cache", ("tokens", "GB/s"), curves)


def run_quality(arguments: argparse.Namespace) -> None:
    """``inferscale bench quality``."""
    from inferscale_runtime.bench.quality.command import COLUMNS, measure

    model = model_folder(arguments)
    report = Report("quality", model, arguments.seed, _settings(arguments), COLUMNS)
    measure(arguments, model, report)
    report.columns = [c for c in COLUMNS if any(row.get(c[0]) is not None for row in report.rows)]
    publish(report, arguments.json, lambda row: arguments.by_category or row["category"] == "all")
    if arguments.plot:
        rows = [row for row in report.rows if row["category"] == "all"]
        curves = [
            Curve(name, [(row["k"], row["kl"]) for row in rows if row["setting"] == name])
            for name in dict.fromkeys(row["setting"] for row in rows)
        ]
        draw(arguments.plot, "Distance to text", ("facts (k)", "KL in nats, mean"), curves)


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    left_out = ("func", "command", "bench", "json", "plot", "seed", "model", "url")
    found = {k: v for k, v in vars(arguments).items() if k not in left_out and v is not None}
    return {k: str(v) if isinstance(v, Path) else v for k, v in found.items()}


__all__ = [
    "BenchError",
    "run_encode",
    "run_inject",
    "run_quality",
    "run_session",
    "run_throughput",
    "run_ttft",
]
