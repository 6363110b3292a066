"""The operator as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.kube.control_plane import environment, eventually
from tests.integration.ports import free_port

#: Flags that let another operator take over within seconds.
SHORT_LEASE = ("--lease-seconds", "5")

_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class OperatorProcess:
    """A running operator.

    Args:
        kubeconfig: How it reaches the API server.
        namespace: The only namespace that it serves; also its lease's.
        folder: For its log.
        flags: Further flags.
    """

    def __init__(self, kubeconfig: Path, namespace: str, folder: Path, *flags: str) -> None:
        self.port = free_port()
        self.log = folder / f"operator-{self.port}.log"
        command = [
            sys.executable,
            "-m",
            "inferscale_operator.main",
            "--kubeconfig",
            str(kubeconfig),
            "--namespaces",
            namespace,
            "--operator-namespace",
            namespace,
            "--lease-seconds",
            "30",
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(self.port),
            "--runtime-image",
            "example.test/runtime:1",
            *flags,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()
            )

    def ask(self, path: str) -> tuple[int, str]:
        """Status and text of one of its pages; status 0 when it does not answer."""
        try:
            with _OPEN.open(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def wait_for(self, state: str) -> None:
        """Waits until it is ready as ``acting`` or as ``standby``."""

        def ready() -> bool:
            assert self.process.poll() is None, f"the operator ended: {self.text()[-3000:]}"
            return self.ask("/readyz") == (200, f"ok: {state}\n")

        eventually(ready, f"the operator is {state}")

    def metric(self, name: str, /, **labels: str) -> float:
        """Sum of the series of a metric that have these labels."""
        total = 0.0
        for line in self.ask("/metrics")[1].splitlines():
            if not line.startswith(name) or line[len(name)] not in " {":
                continue
            if all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def rss_bytes(self) -> int:
        """Its resident memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def peak_bytes(self) -> int:
        """The most resident memory that it has had."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def text(self) -> str:
        """Its log."""
        return self.log.read_text()

    def records(self) -> list[dict[str, str]]:
        """Its log, decoded."""
        return [json.loads(line) for line in self.text().splitlines() if line.startswith("{")]

    def kill(self) -> None:
        """Kills it with SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def stop(self) -> int:
        """Stops it with SIGTERM; its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            raise


@contextmanager
def running_operator(
    kubeconfig: Path, namespace: str, folder: Path, *flags: str, state: str = "acting"
) -> Iterator[OperatorProcess]:
    """An operator for the length of a block."""
    operator = OperatorProcess(kubeconfig, namespace, folder, *flags)
    try:
        operator.wait_for(state)
        yield operator
    except BaseException:
        print(f"the operator's log ends with:\n{operator.text()[-6000:]}")
        raise
    finally:
        if operator.process.poll() is None:
            operator.kill()


@contextmanager
def two_operators(
    kubeconfig: Path, namespace: str, folder: Path
) -> Iterator[tuple[OperatorProcess, OperatorProcess]]:
    """The one that acts and the one that waits for its lease."""
    with (
        running_operator(kubeconfig, namespace, folder, *SHORT_LEASE) as first,
        running_operator(kubeconfig, namespace, folder, *SHORT_LEASE, state="standby") as second,
    ):
        yield first, second
