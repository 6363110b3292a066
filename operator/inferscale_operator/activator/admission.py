"""Who may wait: a bounded number of requests with a bounded number of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

LEAST_BYTES = 16 * 1024
"""What a request counts at least: buffers and headers."""

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_TOTAL_BYTES = 64 * 1024 * 1024
"""Bodies of all requests together; the container's memory limit leaves room for this."""


class FullError(Exception):
    """No more requests can be held."""


class Admission:
    """Counts.

    Args:
        max_requests: Most requests that wait for a server.
        max_bytes: Most bytes of all requests whose bodies are kept.
    """

    def __init__(self, max_requests: int, max_bytes: int = MAX_TOTAL_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.held = 0
        self.bytes = 0

    @contextmanager
    def body(self, size: int | None) -> Iterator[None]:
        """Keeps a body while the block runs.

        Args:
            size: Its bytes; None when the client does not say.

        Raises:
            FullError: There is no room for it.
        """
        room = max(LEAST_BYTES, MAX_BODY_BYTES if size is None else size)
        if self.bytes + room > self._max_bytes:
            raise FullError
        self.bytes += room
        try:
            yield
        finally:
            self.bytes -= room

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Holds a request while the block runs.

        Raises:
            FullError: As many as allowed wait already.
        """
        if self.held >= self._max_requests:
            raise FullError
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1
