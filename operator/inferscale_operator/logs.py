"""Logging: one line per change; never object contents."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_FIELDS = ("action", "kind", "namespace", "object")


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(level: str, style: str) -> None:
    """Sends records of the whole process to standard error.

    Args:
        level: Least level, lower case.
        style: ``json`` or ``text``.
    """
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if style == "json" else text)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # kopf tells every step of its own; only its troubles matter here.
    for name in ("kopf", "aiohttp", "asyncio", "kubernetes"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    # It warns that it does not take signals in its thread; that is as it should be.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
