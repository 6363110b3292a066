"""Local processes behind supervisors, their output and their end (I/O)."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from inferscale_operator.local import supervisor

TAIL_LINES = 80
TAIL_BYTES = 2048
"""What ``FallbackToLogsOnError`` shows of a log at most, as a kubelet does."""

MAX_LOG_BYTES = 10 << 20
"""A log file above this is put aside as ``.1`` when a container starts; the kubelet's size."""

_CHUNK = 1 << 16
_MAX_LINE = 1 << 14


class StartError(Exception):
    """The command cannot be started."""


class Process:
    """One running command.

    Args:
        child: The supervisor.
        log: File that the output is added to.
        on_line: Gets each line of output.
    """

    def __init__(
        self, child: asyncio.subprocess.Process, log: Path, on_line: Callable[[str], None]
    ) -> None:
        self._child = child
        self._log = log
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._reader = asyncio.ensure_future(self._read())

    @property
    def pid(self) -> int:
        """Pid of the supervisor."""
        return self._child.pid

    async def wait(self) -> int:
        """The exit status, as a container runtime reports it (128 + signal)."""
        code = await self._child.wait()
        await self._reader
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """SIGTERM to the command alone."""
        if self._child.returncode is None:
            self._child.terminate()

    def kill(self) -> None:
        """SIGKILL to the command and to everything that it has started."""
        if self._child.returncode is None and self._child.stdin is not None:
            self._child.stdin.close()

    def tail(self) -> str:
        """The end of the output."""
        return "\n".join(self._tail)[-TAIL_BYTES:]

    async def _read(self) -> None:
        stream = self._child.stdout
        assert stream is not None
        rest = ""
        with open(self._log, "ab") as file:
            while chunk := await stream.read(_CHUNK):
                file.write(chunk)
                file.flush()
                *lines, rest = (rest + chunk.decode(errors="replace")).split("\n")
                if len(rest) > _MAX_LINE:
                    lines, rest = [*lines, rest], ""
                self._add(lines)
        if rest:
            self._add([rest])

    def _add(self, lines: Sequence[str]) -> None:
        for line in lines:
            # A progress bar rewrites its line: its last state is what a person would see.
            shown = line.rstrip("\r").rpartition("\r")[2]
            self._tail.append(shown)
            self._on_line(shown)


async def start_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    on_line: Callable[[str], None],
) -> Process:
    """Starts a command under a supervisor, in sessions of their own.

    Args:
        command: The command and its arguments.
        environment: All of its variables.
        folder: Where it starts.
        log: File that its output is added to.
        on_line: Gets each line of its output.

    Raises:
        StartError: When there is no such program.
    """
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise StartError(f'exec: "{command[0]}": executable file not found in $PATH')
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_name(f"{log.name}.1"))
    try:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            supervisor.__file__,
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
        )
    except OSError as error:
        raise StartError(f'exec: "{command[0]}": {error.strerror}') from None
    return Process(child, log, on_line)


_PROGRAMS = {
    "inferscale": "inferscale_runtime.cli",
    "inferscale-operator": "inferscale_operator.main",
}


def program(command: Sequence[str]) -> list[str]:
    """InferScale's programs are this very installation, whatever is on the PATH."""
    if command and command[0] in _PROGRAMS:
        return [sys.executable, "-m", _PROGRAMS[command[0]], *command[1:]]
    return list(command)


def host_environment() -> dict[str, str]:
    """What stands for the image's environment: this machine's, with unbuffered output."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}
