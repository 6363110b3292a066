"""The audit log: who did what to whose memory, as one JSON line for each request.

A line holds no content, no key and no user id: callers and users appear as digests. Lines are
written by a thread, so that a slow disk does not slow down requests.
"""

from __future__ import annotations

import atexit
import json
import logging
import logging.handlers
import queue
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.server.auth.principal import digest

LOG = "log"
"""Setting that sends the lines to the server's own log."""
logger = logging.getLogger("vllm.inferscale.audit")


@dataclass(slots=True)
class AuditRecord:
    """What is known about a request; routes fill it in.

    Attributes:
        action: For example ``facts.put``; the route's access where it says nothing.
        user: Whose memory, or None.
        store: Name of the store, or None.
        counts: For example ``{"created": 2}``.
    """

    action: str = ""
    user: str | None = None
    store: str | None = None
    counts: dict[str, int] = field(default_factory=dict)


class AuditLog:
    """Writes the lines.

    Args:
        target: ``log``, or a file, which is opened again when it was moved away.

    Raises:
        ConfigError: When the file cannot be opened.
    """

    def __init__(self, target: str) -> None:
        self._logger = logger
        if target == LOG:
            return
        try:
            handler = logging.handlers.WatchedFileHandler(target, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"auth.audit '{target}': {error.strerror}") from None
        handler.setFormatter(logging.Formatter("%(message)s"))
        lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._logger = logging.Logger("inferscale.audit.file", logging.INFO)
        self._logger.addHandler(logging.handlers.QueueHandler(lines))
        listener = logging.handlers.QueueListener(lines, handler)
        listener.start()
        atexit.register(listener.stop)

    def write(self, principal: str | None, method: str, status: int, record: AuditRecord) -> None:
        """Writes one line.

        Args:
            principal: The caller's digest, None when nobody was authenticated.
            method: HTTP method.
            status: HTTP status of the answer.
            record: The rest.
        """
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "principal": principal,
            "action": record.action,
            "method": method,
            "user": digest(record.user) if record.user is not None else None,
            "store": record.store,
            "status": status,
        }
        if record.counts:
            line["counts"] = record.counts
        self._logger.info("%s", json.dumps(line, separators=(",", ":")))
