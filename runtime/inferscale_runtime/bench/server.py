"""Encodes the work and runs the real server for as long as it is measured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from inferscale_runtime.bench.report import BenchError
from inferscale_runtime.bench.workload import Workload

START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 30
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


def command(*args: str) -> list[str]:
    """The ``inferscale`` command in this interpreter."""
    return [sys.executable, "-P", "-m", "inferscale_runtime.cli", *args]


def environment() -> dict[str, str]:
    """Nothing is downloaded and nothing is reported while measuring."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def encode_workload(options: ServerOptions, workload: Workload) -> None:
    """Encodes the facts into ``workdir/store``; what is there already is not read again.

    Raises:
        BenchError: The command failed; its own message is on the terminal.
    """
    file = options.workdir / "facts.jsonl"
    file.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in workload.lines),
        encoding="utf-8",
    )
    arguments = ["encode", "--input", str(file), "--model", options.model]
    arguments += ["--store", str(options.workdir / "store"), "--dtype", options.dtype]
    arguments += ["--policy", options.policy]
    status = subprocess.run(command(*arguments), env=environment(), check=False).returncode
    if status:
        raise BenchError(f"'inferscale encode' failed with status {status}, see above")


@contextlib.contextmanager
def running_server(options: ServerOptions) -> Iterator[str]:
    """Runs ``inferscale serve`` while the block runs and gives its URL.

    Raises:
        BenchError: It does not come up; the message shows the log's end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    arguments = ["serve", "--model", options.model, "--store", str(options.workdir / "store")]
    arguments += ["--dtype", options.dtype, "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--served-model-name", SERVED_NAME, "--dram-bytes", str(options.dram_bytes)]
    arguments += ["--", *options.vllm_args]
    with options.log.open("wb") as output:
        process = subprocess.Popen(
            command(*arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,  # Ctrl-C reaches this process, which then stops the server
        )
        try:
            _wait_healthy(process, url, options.log)
            yield url
        finally:
            _stop(process)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends the block by an exception, so that what it has started is stopped too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    import httpx

    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(trust_env=False, timeout=5) as client:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{url}/health").status_code == 200:
                    return
            time.sleep(0.5)
    status = process.poll()
    what = f"was not ready after {START_TIMEOUT_S} s" if status is None else f"ended with {status}"
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
    raise BenchError(f"the server {what}. End of {log}:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    # The engine is a child of its own; the group reaches it also when the parent is gone.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def find_log_line(log: Path, part: str) -> str | None:
    """The last line of the server's log that contains a text, from that text on."""
    lines: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line[line.index(part) :] for line in reversed(lines) if part in line), None)
