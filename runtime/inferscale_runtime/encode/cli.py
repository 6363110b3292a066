"""``inferscale encode`` and ``inferscale locomo``: arguments only; the work is in ``job``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from inferscale_runtime.config import RuntimeConfig, load_config
from inferscale_runtime.errors import ConfigError


def base_config(arguments: argparse.Namespace) -> RuntimeConfig:
    """The config file of ``--config``, or the defaults, with ``--store`` on top."""
    config = RuntimeConfig()
    if arguments.config:
        try:
            config = load_config(Path(arguments.config).read_text(), arguments.config)
        except OSError as error:
            raise ConfigError(f"--config '{arguments.config}': {error.strerror}") from error
    if arguments.store:
        config = config.model_copy(update={"store": arguments.store})
    if not config.store:
        raise ConfigError("--store is missing: name the store's folder or URL")
    return config


def parse_shard(text: str) -> tuple[int, int]:
    """Reads ``i/n`` with ``0 <= i < n``."""
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError:
        raise ConfigError(f"--shard '{text}': write i/n, for example 0/4") from None
    if not 0 <= index < count:
        raise ConfigError(f"--shard '{text}': the index must lie in 0..{count - 1}")
    return index, count


def register(subparsers: Any) -> None:
    """Adds the commands."""
    encode = subparsers.add_parser(
        "encode",
        help="read facts once and keep their KV in a store",
        description="Reads facts with the serving engine and keeps their keys and values. Only "
        "new or changed facts are read; a killed job goes on where it was.",
    )
    encode.add_argument("--input", required=True, help="JSONL of turns and facts, - for stdin")
    encode.add_argument("--model", required=True, help="model folder or hub id")
    encode.add_argument("--store", help="folder or fsspec URL; made if it does not exist")
    encode.add_argument("--config", help="RuntimeConfig as JSON")
    encode.add_argument("--policy", help="context policy, for example neighbours:10")
    encode.add_argument("--embedder", help="minilm, a folder, or openai:MODEL@URL")
    encode.add_argument("--embedder-api-key-file", help="API key of an openai: embedder")
    encode.add_argument("--dtype", default="auto", help="vLLM dtype of model and KV")
    encode.add_argument("--max-model-len", type=int, help="longest prompt in tokens")
    encode.add_argument(
        "--kv-cache-bytes", type=int, default=1 << 30, help="size of the engine's KV cache"
    )
    encode.add_argument("--chat-template", help="file with a Jinja chat template")
    encode.add_argument("--shard", default="0/1", help="i/n: only users of this shard")
    encode.add_argument("--json", help="write the report to this file")
    encode.set_defaults(func=run_encode)
    locomo = subparsers.add_parser("locomo", help="convert LoCoMo data to input lines on stdout")
    locomo.add_argument("file", help="locomo10.json")
    locomo.set_defaults(func=run_locomo)


def run_encode(arguments: argparse.Namespace) -> int:
    """Runs the job and prints a line about it."""
    config = base_config(arguments)
    changes = {
        name: value
        for name, value in (("policy", arguments.policy), ("embedder", arguments.embedder))
        if value
    }
    config = config.model_copy(update={"encoding": config.encoding.model_copy(update=changes)})
    if arguments.embedder_api_key_file:
        key = {"embedder_api_key_file": arguments.embedder_api_key_file}
        config = config.model_copy(update={"retrieval": config.retrieval.model_copy(update=key)})
    shard = parse_shard(arguments.shard)
    from inferscale_runtime.encode.input import read_input

    users = read_input(arguments.input)
    from tqdm import tqdm

    from inferscale_runtime.encode.job import EncodeJob, ModelOptions

    template = Path(arguments.chat_template).read_text() if arguments.chat_template else None
    # vLLM's own deprecation warnings are not the user's business; errors still show.
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    options = ModelOptions(
        arguments.model,
        arguments.dtype,
        arguments.max_model_len,
        template,
        arguments.kv_cache_bytes,
    )
    report = EncodeJob(config, options).run(users, arguments.input, shard, tqdm)
    rate = f" in {report.seconds:.0f} s ({report.tokens} tokens)" if report.encoded else ""
    print(
        f"{report.users} users, {report.facts} facts: {report.encoded} encoded{rate}, "
        f"fingerprint {report.fingerprint[:16]}"
    )
    if arguments.json:
        fields = {name: getattr(report, name) for name in report.__slots__}
        Path(arguments.json).write_text(json.dumps(fields) + "\n")
    return 0


def run_locomo(arguments: argparse.Namespace) -> int:
    """Writes converted lines to stdout."""
    from inferscale_runtime.encode.locomo import convert

    for line in convert(arguments.file):
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    return 0
