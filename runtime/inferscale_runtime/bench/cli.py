"""The command ``inferscale bench``: arguments and their checks; ``run`` does the work."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.packing.shape import KV_DTYPES

DEFAULT_MODEL = Path("build/demo/model")


def whole_numbers(low: int, high: int) -> Callable[[str], list[int]]:
    """An argument type: ascending whole numbers with commas, such as ``5,10,50``."""

    def parse(text: str) -> list[int]:
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}': write numbers as 5,10,50") from None
        if any(not low <= value <= high for value in values) or values != sorted({*values}):
            raise argparse.ArgumentTypeError(
                f"'{text}': each must lie in {low}..{high}, in ascending order"
            )
        return values

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """An argument type: a number in a range."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: must lie in {low:g}..{high:g}")
        return value

    return parse


def whole(low: int, high: int) -> Callable[[str], int]:
    """An argument type: one whole number in a range."""

    def parse(text: str) -> int:
        values = whole_numbers(low, high)(text)
        if len(values) != 1:
            raise argparse.ArgumentTypeError(f"'{text}': write one number")
        return values[0]

    return parse


def register(subparsers: Any) -> None:
    """Adds the commands.

    Args:
        subparsers: What ``add_subparsers`` of the ``inferscale`` parser returned.
    """
    bench: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure TTFT, throughput, encoding and injection on this machine",
        description="Each prints one table. docs/benchmarks.md says what the columns mean.",
    )
    kinds = bench.add_subparsers(title="benchmarks", dest="bench", metavar="BENCH", required=True)
    _add_ttft(kinds)
    _add_session(kinds)
    _add_throughput(kinds)
    _add_encode(kinds)
    _add_inject(kinds)
    _add_quality(kinds)


def _add(kinds: Any, name: str, text: str, runner: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=text, description=text)
    parser.add_argument(
        "--model",
        default=None,
        metavar="DIR",
        help=f"model folder; by default SmolLM2-135M-Instruct, made in {DEFAULT_MODEL}",
    )
    parser.add_argument("--dtype", default="float32", help="vLLM dtype")
    parser.add_argument("--seed", type=whole(0, 2**31), default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curve")
    parser.set_defaults(func=_lazily(runner))
    return parser


def _lazily(runner: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        from inferscale_runtime.bench import run as runs
        from inferscale_runtime.bench.report import check_outputs
        from inferscale_runtime.children import terminable

        check_outputs(arguments.json, arguments.plot)
        with terminable():
            getattr(runs, runner)(arguments)
        return 0

    return run


def _add_serving(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--api-key-file", help="with --url: file with an API key or token of it")
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="LoCoMo data set instead of synthetic facts"
    )
    parser.add_argument("--workdir", type=Path, default=Path("build/bench"), metavar="DIR")
    parser.add_argument("--server-log", type=Path, metavar="FILE")
    parser.add_argument("--policy", default="none", help="context policy of the encoding")
    parser.add_argument("--dram-bytes", type=whole(1 << 20, 1 << 44), help="size of the arena")
    parser.add_argument(
        "--facts", type=whole(1, 10_000), help="synthetic facts of each user (default: the k)"
    )
    parser.add_argument("vllm_args", nargs=argparse.REMAINDER, help="-- and vLLM arguments")


def _add_ttft(kinds: Any) -> None:
    parser = _add(kinds, "ttft", "time to first token over k", "run_ttft")
    parser.add_argument("--k", type=whole_numbers(1, 1000), default=[5, 10, 20, 50])
    parser.add_argument("--repeats", type=whole(1, 1000), default=15, help="questions for each k")
    parser.add_argument("--users", type=whole(1, 10_000), default=3)
    parser.add_argument(
        "--baseline", choices=("mem0",), help="also measure text through this memory library"
    )
    _add_serving(parser)


def _add_session(kinds: Any) -> None:
    text = "time to first token over a chat's turns, with and without a session"
    parser = _add(kinds, "session", text, "run_session")
    parser.add_argument("--turns", type=whole(2, 1000), default=10)
    parser.add_argument("--k", type=whole(1, 1000), default=20)
    parser.add_argument("--max-tokens", type=whole(1, 4096), default=24, help="of each answer")
    parser.add_argument("--users", type=whole(1, 1000), default=3, help="chats, each of its user")
    _add_serving(parser)
    parser.set_defaults(facts=60)


def _add_throughput(kinds: Any) -> None:
    parser = _add(kinds, "throughput", "queries per second of many users", "run_throughput")
    parser.add_argument("--k", type=whole(1, 1000), default=50)
    parser.add_argument("--max-tokens", type=whole(1, 4096), default=20)
    parser.add_argument(
        "--concurrency", type=whole_numbers(1, 10_000), default=[1, 10, 25, 50, 100]
    )
    parser.add_argument(
        "--requests", type=whole(1, 10**6), help="for each row (default: 2 a client, at least 10)"
    )
    parser.add_argument("--users", type=whole(1, 10_000), default=100)
    parser.add_argument("--zipf", type=number(0, 10), default=1.0, help="exponent of the access")
    parser.add_argument(
        "--rate", type=number(0.001, 1e6), help="open loop: arrivals a second, instead of clients"
    )
    parser.add_argument("--modes", default="injected,text", help="injected,text or one of them")
    _add_serving(parser)


def _add_encode(kinds: Any) -> None:
    text = "encode tokens/s beside the engine's own prefill"
    parser = _add(kinds, "encode", text, "run_encode")
    parser.add_argument("--prompts", type=whole(1, 100_000), default=48)
    parser.add_argument("--prompt-tokens", type=whole_numbers(2, 100_000), default=[350])
    parser.add_argument("--kept-tokens", type=whole(1, 100_000), default=30)
    parser.add_argument("--passes", type=whole(1, 1000), default=3)
    parser.add_argument("--rounds", type=whole(1, 100), default=2)
    parser.add_argument("--kv-cache-bytes", type=whole(1 << 20, 1 << 44), default=1 << 30)


def _add_inject(kinds: Any) -> None:
    text = "GB/s of the cache writers beside a memcpy"
    parser = _add(kinds, "inject", text, "run_inject")
    parser.add_argument(
        "--tokens", type=whole_numbers(1, 10**6), default=[150, 300, 600, 1500, 3000]
    )
    parser.add_argument("--repeats", type=whole(1, 10_000), default=25)
    parser.add_argument("--kv-cache-bytes", type=whole(1 << 20, 1 << 44), default=1 << 30)


def _add_quality(kinds: Any) -> None:
    from inferscale_runtime.bench.quality.settings import DEFAULT_SETTINGS

    parser = _add(kinds, "quality", "answers against text, by encoding", "run_quality")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="LoCoMo data set, locomo10.json"
    )
    parser.add_argument("--workdir", type=Path, default=Path("build/quality"), metavar="DIR")
    parser.add_argument(
        "--settings",
        default=DEFAULT_SETTINGS,
        metavar="LIST",
        help="POLICY[+linkN][+stored] with commas, such as neighbours:10+link5",
    )
    parser.add_argument("--k", type=whole_numbers(1, 1000), default=[20, 50])
    parser.add_argument("--users", type=whole(1, 10), default=3, help="conversations")
    parser.add_argument(
        "--questions", type=whole(1, 1000), default=70, help="most questions of each conversation"
    )
    parser.add_argument(
        "--generate", type=whole(0, 4096), default=0, help="also answers of so many tokens, for F1"
    )
    parser.add_argument("--judge", metavar="URL", help="OpenAI-compatible API that grades answers")
    parser.add_argument("--judge-model", metavar="NAME")
    parser.add_argument("--judge-api-key-file", type=Path, metavar="FILE")
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="how the stores keep KV; text and stores of other runs in --workdir are used again",
    )
    parser.add_argument(
        "--timed", type=whole(0, 1000), default=0, help="also time so many questions of each row"
    )
    parser.add_argument("--by-category", action="store_true", help="table by category too")
    parser.add_argument("--max-model-len", type=whole(256, 1 << 20), default=4096)
    parser.add_argument("--dram-bytes", type=whole(1 << 20, 1 << 44), default=1 << 30)
    parser.add_argument("--kv-cache-bytes", type=whole(1 << 20, 1 << 44), default=256 << 20)


def parse_modes(text: str) -> list[str]:
    """Reads ``--modes``.

    Raises:
        ConfigError: Naming the value.
    """
    modes = text.split(",")
    if not modes or any(mode not in ("injected", "text") for mode in modes):
        raise ConfigError(f"--modes '{text}': use injected, text, or both with a comma")
    return list(dict.fromkeys(modes))
