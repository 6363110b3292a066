"""Other ``inferscale`` commands as children: an encoding, and a server while it is used."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from inferscale_runtime.errors import InferScaleError

START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 30


class ChildError(InferScaleError):
    """A command that was started failed."""


def command(*args: str) -> list[str]:
    """The ``inferscale`` command in this interpreter."""
    # -P: the folder that one is in must not shadow installed packages.
    return [sys.executable, "-P", "-m", "inferscale_runtime.cli", *args]


def environment() -> dict[str, str]:
    """Nothing is downloaded and nothing is reported by a child."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def encode(arguments: Sequence[str]) -> None:
    """Runs ``inferscale encode`` on this terminal.

    Raises:
        ChildError: It failed; its own message is on the terminal.
    """
    done = subprocess.run(command("encode", *arguments), env=environment(), check=False)
    if done.returncode:
        raise ChildError(f"'inferscale encode' failed with status {done.returncode}, see above")


@contextlib.contextmanager
def running_server(arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Runs ``inferscale serve`` on a free port while the block runs and gives its URL.

    Args:
        arguments: Of ``serve``, without host and port; ``--`` and vLLM's last.
        log: File for its output.

    Raises:
        ChildError: It does not come up; the message shows the log's end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command("serve", "--host", "127.0.0.1", "--port", str(port), *arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,  # Ctrl-C reaches this process, which then stops the server
        )
        try:
            _wait_healthy(process, url, log)
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
    raise ChildError(f"the server {what}. End of {log}:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    # The engine is a child of its own; the group reaches it also when the parent is gone.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
