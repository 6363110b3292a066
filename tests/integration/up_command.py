"""A running ``inferscale up``, as a user has it in a terminal."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.integration.commands import ENVIRONMENT


class Command:
    """A running ``inferscale up``."""

    def __init__(
        self, program: Sequence[str], folder: Path, *options: str, patience: float
    ) -> None:
        self.file = folder / "f.yaml"
        self.data = folder / "data"
        self.lines: list[str] = []
        self._patience = patience
        words = ["-f", str(self.file), "--data-dir", str(self.data), "--port", "0", *options]
        self.process = subprocess.Popen(
            [*program, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in iter(self.process.stdout.readline, ""))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def until(self, condition: Callable[[], Any], pause: float = 0.02) -> Any:
        end = time.monotonic() + self._patience
        while time.monotonic() < end:
            if found := condition():
                return found
            assert self.process.poll() is None, self.text
            time.sleep(pause)
        raise AssertionError(self.text)

    def curl(self, number: int = 1) -> str:
        """The curl line that was printed for the n-th time."""

        def found() -> str | None:
            lines = [line for line in self.lines if line.startswith("curl ")]
            return lines[number - 1] if len(lines) >= number else None

        line: str = self.until(found)
        return line

    def get(self, path: str = "/") -> dict[str, Any]:
        """What the server says through the Service's port."""
        return self._ask(urllib.request.Request(self._address() + path))

    def post(self, path: str, body: Any, method: str = "POST") -> dict[str, Any]:
        """What the server answers to a JSON body."""
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        return self._ask(
            urllib.request.Request(self._address() + path, data, headers, method=method)
        )

    def _address(self) -> str:
        address = re.search(r"http://127\.0\.0\.1:\d+", self.curl())
        assert address is not None
        return address.group(0)

    def _ask(self, request: urllib.request.Request) -> dict[str, Any]:
        with urllib.request.urlopen(request, timeout=self._patience) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def pids(self) -> list[int]:
        """Supervisors and containers that this command has started, deep down."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(path.parent.name)] = int(fields[1])
        found, level = [], {self.process.pid}
        while level:
            level = {pid for pid, parent in parents.items() if parent in level}
            found.extend(level)
        return found

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Waits for its end; the exit status."""
        code = self.process.wait(self._patience)
        self._reader.join(self._patience)
        return code


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
