"""A real server, in vLLM's ordinary process split."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.integration.commands import ENVIRONMENT, command
from tests.integration.ports import free_port


@dataclass
class Served:
    client: httpx.Client
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def serve(
    model: Path, dtype: str, log: Path, *flags: str, environment: dict[str, str] | None = None
) -> Iterator[Served]:
    port = free_port()
    arguments = ["serve", "--model", str(model), "--dtype", dtype, "--port", str(port)]
    arguments += ["--served-model-name", "smollm2", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(*arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT | (environment or {}),
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            deadline = time.monotonic() + 900
            while True:
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.5)
            # The ordinary process split: API server, engine and worker apart.
            assert "(EngineCore pid=" in log.read_text()
            yield Served(client, process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
