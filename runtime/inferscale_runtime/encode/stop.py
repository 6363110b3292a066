"""SIGTERM while encoding: nothing that was read is lost, and the process goes within seconds."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_TERMINATED = 128 + signal.SIGTERM


class Terminated(SystemExit):
    """Ends the process with status 143."""

    def __init__(self) -> None:
        super().__init__(EXIT_TERMINATED)


class StopSignal:
    """Raises ``Terminated`` in the main thread, at once or when the work in hand is safe."""

    def __init__(self) -> None:
        self.requested = False
        self._deferred = 0

    def install(self) -> None:
        """Takes SIGTERM over; call it in the main thread."""
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        if not self._deferred:
            raise Terminated

    def check(self) -> None:
        """Raises if SIGTERM came."""
        if self.requested:
            raise Terminated

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Holds the exception back; the code inside asks ``requested`` itself, or ends soon."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        if not self._deferred:
            self.check()
