"""``inferscale encode`` and ``inferscale locomo``: arguments only; the work is in ``job``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscale_runtime.config import RuntimeConfig, load_config
from inferscale_runtime.encode.import_cli import run_locomo
from inferscale_runtime.encode.status import EncodeStatus, StatusServer
from inferscale_runtime.encode.stop import StopSignal, Terminated
from inferscale_runtime.errors import ConfigError, InferScaleError
from inferscale_runtime.packing.shape import KV_DTYPES

if TYPE_CHECKING:
    from inferscale_runtime.encode.input import UserInput
    from inferscale_runtime.encode.job import EncodeReport


def base_config(arguments: argparse.Namespace) -> RuntimeConfig:
    """The config file of ``--config``, or the defaults, with ``--store`` on top."""
    config = RuntimeConfig()
    if arguments.config:
        try:
            config = load_config(Path(arguments.config).read_text(), arguments.config)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"--config '{arguments.config}': {reason}") from error
    if arguments.store:
        config = config.model_copy(update={"store": arguments.store, "stores": ()})
    if not config.store_entries:
        raise ConfigError("--store is missing: name the store's folder or URL")
    return config


def encode_config(arguments: argparse.Namespace) -> RuntimeConfig:
    """The settings of one encoding job.

    Raises:
        ConfigError: When they name no store, or several.
    """
    config = base_config(arguments)
    entries = config.store_entries
    if len(entries) > 1:
        names = ", ".join(entry.name for entry in entries)
        raise ConfigError(
            f"--config '{arguments.config}': a job writes one store and field 'stores' names "
            f"{len(entries)} ({names}); choose one with --store URL"
        )
    changes = {
        name: value
        for name, value in (
            ("policy", arguments.policy),
            ("embedder", arguments.embedder),
            ("kv_dtype", arguments.kv_dtype),
        )
        if value
    }
    retrieval = {}
    if arguments.embedder_api_key_file:
        retrieval["embedder_api_key_file"] = arguments.embedder_api_key_file
    return config.model_copy(
        update={
            "store": entries[0].url,
            "stores": (),
            "encoding": config.encoding.model_copy(update=changes),
            "retrieval": config.retrieval.model_copy(update=retrieval),
        }
    )


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
    encode.add_argument(
        "--pending",
        action="store_true",
        help="no input: read the facts of the store that have no KV for this model yet, as those "
        "written through the memory API",
    )
    encode.add_argument(
        "--input",
        default=[],
        action="append",
        help="JSONL of turns and facts, may be .gz: file, folder of *.jsonl, http(s):// or fsspec "
        "URL, - for stdin; may be repeated",
    )
    encode.add_argument(
        "--input-authorization-file",
        metavar="FILE",
        help="holds the HTTP Authorization header for http(s):// inputs",
    )
    _add_source(encode)
    encode.add_argument(
        "--model", required=True, help="model folder, hub id or builtin:smollm2-135m"
    )
    encode.add_argument("--revision", help="branch, tag or commit of a hub id")
    encode.add_argument("--store", help="folder or fsspec URL; made if it does not exist")
    encode.add_argument("--config", help="RuntimeConfig as JSON")
    encode.add_argument("--policy", help="context policy, for example neighbours:10")
    encode.add_argument(
        "--kv-dtype", choices=KV_DTYPES, help="how KV is stored; auto: not quantised"
    )
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
    encode.add_argument(
        "--status-port", type=int, help="serve /inferscale/v1/status and /metrics on this port"
    )
    encode.add_argument("--status-host", default="0.0.0.0", help="address of --status-port")
    encode.set_defaults(func=run_encode)
    locomo = subparsers.add_parser("locomo", help="the same as 'import locomo'")
    locomo.add_argument("file", help="locomo10.json")
    locomo.set_defaults(func=run_locomo)


def _add_source(encode: argparse.ArgumentParser) -> None:
    encode.add_argument(
        "--source",
        metavar="TOOL[:PLACE]",
        help="read a tool: mem0, zep or letta, and its URL; see docs/sources.md",
    )
    encode.add_argument(
        "--source-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of --source; may be repeated",
    )
    encode.add_argument(
        "--source-token-file",
        metavar="FILE",
        help="holds the tool's API key; without it, $MEM0_API_KEY and so on does",
    )
    encode.add_argument(
        "--allow-empty-source",
        action="store_true",
        help="a tool without users deletes all that came from it",
    )


class EncodeFault(InferScaleError):
    """Something went wrong that is no fault of the input."""


def run_encode(arguments: argparse.Namespace) -> int:
    """Runs the job and prints a line about it."""
    started = time.perf_counter()
    config = encode_config(arguments)
    shard = parse_shard(arguments.shard)
    stop = StopSignal()
    stop.install()
    status = EncodeStatus(arguments.shard)
    if arguments.status_port is not None:
        StatusServer(status, arguments.status_host, arguments.status_port)
    _check_report(arguments.json)
    try:
        report = _encode(arguments, config, shard, status, stop)
    except Terminated:
        print(
            "inferscale: encode was stopped by SIGTERM; the same command goes on from here",
            file=sys.stderr,
        )
        raise
    except InferScaleError:
        status.enter("failed")
        raise
    except Exception as error:
        # The last line of a failed pod's log becomes its message, so it must say what happened.
        status.enter("failed")
        traceback.print_exc()
        first = (str(error).strip() or "no message").splitlines()[0][:500]
        raise EncodeFault(f"encode failed: {type(error).__name__}: {first}") from error
    report.seconds = round(time.perf_counter() - started, 3)
    rate = f" in {report.seconds:.0f} s ({report.tokens} tokens)" if report.encoded else ""
    print(
        f"{report.users} users, {report.facts} facts: {report.encoded} encoded{rate}, "
        f"{report.removed} removed, fingerprint {report.fingerprint[:16]}"
    )
    if arguments.json:
        # In place: a pod's termination log is a mounted file that cannot be replaced.
        Path(arguments.json).write_text(json.dumps(asdict(report)) + "\n")
    return 0


def _check_report(path: str | None) -> None:
    """A job of hours must not fail at its very end."""
    if path is None:
        return
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise ConfigError(f"--json '{path}': {error.strerror}; name a writable file") from error


def _encode(
    arguments: argparse.Namespace,
    config: RuntimeConfig,
    shard: tuple[int, int],
    status: EncodeStatus,
    stop: StopSignal,
) -> EncodeReport:
    from inferscale_runtime.encode.limits import Retained, drop_expired

    retained, source = Retained({}), ""
    _check_inputs(arguments)
    if not arguments.pending:
        status.enter("reading_input")
        users, source = _read(arguments, config, shard)
        retained = drop_expired(users, config.retention.max_age_days, datetime.now(UTC))
    template = Path(arguments.chat_template).read_text() if arguments.chat_template else None
    status.enter("loading")
    # vLLM's own deprecation warnings are not the user's business; errors still show.
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not sys.stderr.isatty():
        # Bars of the libraries write carriage returns, which make one endless line of a pod's log.
        os.environ.setdefault("TQDM_DISABLE", "1")
    from inferscale_runtime.encode.job import EncodeJob, ModelOptions

    options = ModelOptions(
        arguments.model,
        arguments.dtype,
        arguments.max_model_len,
        template,
        arguments.kv_cache_bytes,
        arguments.revision,
    )
    job = EncodeJob(config, options, status, stop)
    job.report.expired = retained.expired
    if arguments.pending:
        job.run_pending(shard)
        return job.report
    job.run(retained.users, source, shard)
    if retained.expired:
        print(
            f"{retained.expired} facts are older than retention.max_age_days and were left out, "
            f"{retained.undated} have no ISO 8601 time and were kept"
        )
    return job.report


def _check_inputs(arguments: argparse.Namespace) -> None:
    if sum(map(bool, (arguments.input, arguments.source, arguments.pending))) != 1:
        raise ConfigError("give exactly one of --input, --source TOOL[:PLACE] and --pending")


def _read(
    arguments: argparse.Namespace, config: RuntimeConfig, shard: tuple[int, int]
) -> tuple[dict[str, UserInput], str]:
    """Reads the input or the tool; with the name for messages."""
    from inferscale_runtime.encode.input import read_inputs
    from inferscale_runtime.encode.shards import in_shard
    from inferscale_runtime.encode.sources import shown

    max_bytes = config.encoding.max_input_bytes
    if not arguments.source:
        users = read_inputs(
            arguments.input,
            authorization_file=arguments.input_authorization_file,
            max_bytes=max_bytes,
        )
        return users, ", ".join(map(shown, arguments.input))
    from inferscale_runtime.encode.tool_source import ToolSource, read_tool

    source = ToolSource(
        arguments.source,
        arguments.source_option,
        arguments.source_token_file,
        arguments.allow_empty_source,
    )
    users = read_tool(source, config.store, lambda user: in_shard(user, *shard), max_bytes)
    return users, arguments.source.partition(":")[0]
