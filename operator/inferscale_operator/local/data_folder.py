"""The data folder of ``inferscale up``: one user at a time, known content (I/O)."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from pathlib import Path

from inferscale_runtime.budget import ConfigError

LOCK = "up.pid"
STATE = "state.json"
_CONTENT = (STATE, f"{STATE}.new", "pods", "volumes", "logs", "memory", "keys", LOCK)


class DataFolder:
    """One data folder.

    Args:
        path: Its path; it is made when it is used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._descriptor: int | None = None

    @property
    def state(self) -> Path:
        """File with all objects."""
        return self.path / STATE

    def lock(self) -> None:
        """Takes the folder for this process, as long as it lives.

        Raises:
            ConfigError: Another process has it, or it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"--data-dir '{self.path}': {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"--data-dir '{self.path}': process {self.running()} runs here; stop it with "
                f"'inferscale up --down --data-dir {self.path}', or name another folder"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def unlock(self) -> None:
        """Gives the folder back."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def running(self) -> int | None:
        """Pid of the process that has the folder; None when there is none."""
        try:
            with open(self.path / LOCK, "r+b") as stream:
                text = stream.read()
                try:
                    fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(text or 0)
        except OSError:
            return None
        return None

    def stop(self, timeout: float) -> int | None:
        """Ends the process that has the folder, and waits for it.

        Args:
            timeout: Longest time to wait in seconds.

        Returns:
            Its pid; None when there was none.

        Raises:
            ConfigError: It did not end in time.
        """
        pid = self.running()
        if not pid:
            return None
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + timeout
        while self.running() == pid:
            if time.monotonic() > end:
                raise ConfigError(
                    f"process {pid} has not ended after {timeout:.0f} s; a second signal ends it "
                    f"at once: kill {pid}"
                )
            time.sleep(0.1)
        return pid

    def remove(self) -> None:
        """Removes what ``up`` keeps in the folder, and the folder when nothing else is in it."""
        for name in _CONTENT:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                _make_removable(path)
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()


def _make_removable(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
