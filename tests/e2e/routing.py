"""The real servers of the whole system, and the real router before them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.integration.kube.control_plane import BIN, environment, eventually

_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def running_router(servers: Sequence[int], port: int, folder: Path) -> Iterator[None]:
    """A router on a port, before servers on ports of this machine.

    It is given addresses: on this machine each pod has a port of its own, and the router takes one
    for all. ``tests/integration/kube/test_router.py`` has it find pods.
    """
    program = shutil.which("vllm-router", path=str(BIN))
    assert program, "vllm-router is missing: it is one of the development requirements"
    urls = [f"http://127.0.0.1:{number}" for number in servers]
    with (folder / "router.log").open("wb") as output:
        process = subprocess.Popen(
            [
                *(program, "--host", "127.0.0.1", "--port", str(port)),
                *("--policy", "consistent_hash", "--worker-urls", *urls),
                *("--prometheus-port", str(port + 1), "--worker-startup-check-interval", "1"),
            ],
            env={**environment(), "RUST_LOG": "warn"},
            stdout=output,
            stderr=output,
        )

    def ready() -> bool:
        try:
            with _OPEN.open(f"http://127.0.0.1:{port}/readiness", timeout=5) as answer:
                return bool(json.loads(answer.read())["healthy_workers"] == len(servers))
        except OSError:
            return False

    try:
        eventually(ready, "the router knows all servers")
        yield
    finally:
        process.terminate()
        process.wait(60)


def is_healthy(server: int) -> bool:
    """Whether the server on a port answers its health check."""
    try:
        with _OPEN.open(f"http://127.0.0.1:{server}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def requests_of(server: int) -> float:
    """Requests with memory that a server has had."""
    return _sum_of("inferscale_requests_total", server)


def running_on(server: int) -> float:
    """Requests that run on a server now."""
    return _sum_of("vllm:num_requests_running", server)


def _sum_of(metric: str, server: int) -> float:
    with _OPEN.open(f"http://127.0.0.1:{server}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^{metric}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))
