"""Encodes the work and runs the real server for as long as it is measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from inferscale_runtime.bench.workload import Workload
from inferscale_runtime.children import encode, running_server

SERVED_NAME = "bench"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server is started.

    Attributes:
        model: Model folder.
        dtype: vLLM dtype.
        workdir: Folder for the store.
        log: The server's log file.
        policy: Context policy of the encoding; it does not change what is timed here.
        dram_bytes: Size of the arena.
        vllm_args: Further arguments of vLLM's server.
    """

    model: str
    dtype: str
    workdir: Path
    log: Path
    policy: str
    dram_bytes: int
    vllm_args: tuple[str, ...]


def say(text: str) -> None:
    """Prints progress to stderr, so that stdout is the table alone."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def encode_workload(options: ServerOptions, workload: Workload) -> None:
    """Encodes the facts into ``workdir/store``; what is there already is not read again.

    Raises:
        ChildError: The command failed; its own message is on the terminal.
    """
    file = options.workdir / "facts.jsonl"
    file.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in workload.lines),
        encoding="utf-8",
    )
    arguments = ["--input", str(file), "--model", options.model]
    arguments += ["--store", str(options.workdir / "store"), "--dtype", options.dtype]
    arguments += ["--policy", options.policy]
    encode(arguments)


def bench_server(options: ServerOptions) -> AbstractContextManager[str]:
    """Runs ``inferscale serve`` over the store while the block runs and gives its URL.

    Raises:
        ChildError: It does not come up; the message shows the log's end.
    """
    arguments = ["--model", options.model, "--store", str(options.workdir / "store")]
    arguments += ["--dtype", options.dtype, "--served-model-name", SERVED_NAME]
    arguments += ["--dram-bytes", str(options.dram_bytes), "--", *options.vllm_args]
    return running_server(arguments, options.log)


def find_log_line(log: Path, part: str) -> str | None:
    """The last line of the server's log that contains a text, from that text on."""
    lines: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line[line.index(part) :] for line in reversed(lines) if part in line), None)
