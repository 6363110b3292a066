"""Reads Mem0 through its own Python library, with the configuration of the application.

The library lists one user's memories; the users themselves are in the vector store's payloads,
which is where Mem0's server finds them too. Nothing is written, and no model is asked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from inferscale_runtime.errors import ConfigError, SourceError
from inferscale_runtime.importing.answers import checked
from inferscale_runtime.importing.mem0_rows import ORIGIN, Row, facts, today, valid
from inferscale_runtime.importing.records import ToolMemory, ToolUser, user_problem

MAX_ROWS = 1_000_000
"""Most memories of all users together: the vector stores list without pages (arbitrary)."""

_ROWS = TypeAdapter(list[Row])


class Mem0Library:
    """Mem0's library.

    Args:
        config_file: What the application gives to ``Memory.from_config``, as JSON or YAML.

    Raises:
        ConfigError: The library is not installed, or the file cannot be used.
        SourceError: The library cannot open its stores.
    """

    origin = ORIGIN

    def __init__(self, config_file: str) -> None:
        config = _load(config_file)
        self.source = str(Path(config_file).resolve())
        # Both are read when the library is imported.
        os.environ.setdefault("MEM0_TELEMETRY", "False")
        try:
            from mem0 import Memory
        except ImportError:
            raise ConfigError(
                f"source mem0 '{config_file}': the library is not installed: "
                "pip install 'inferscale[mem0]'"
            ) from None
        try:
            self._memory: Any = Memory.from_config(config)
        except Exception as error:  # each of its stores and models has errors of its own
            # Not the message: it may quote the configuration.
            raise SourceError(
                f"source mem0 '{config_file}': the library cannot open its memory "
                f"({type(error).__name__}). Check the configuration; a local Qdrant folder can be "
                "open in one process only, so stop the application or use its server"
            ) from None
        self._counts: dict[str, int] = {}
        self._skipped: dict[str, int] = {}

    def users(self) -> list[ToolUser]:
        """See `Reader.users`."""
        rows = _rows(self._ask(lambda: self._memory.vector_store.list(top_k=MAX_ROWS)))
        if len(rows) >= MAX_ROWS:
            raise SourceError(
                f"source mem0 '{self.source}': it holds {MAX_ROWS} memories or more, which cannot "
                "be listed whole; split them over several collections"
            )
        self._counts, self._skipped = {}, {}
        for row in rows:
            user = str((getattr(row, "payload", None) or {}).get("user_id") or "")
            problem = user_problem(user) if user else "memory of no user"
            if problem:
                self._skipped[problem] = self._skipped.get(problem, 0) + 1
            else:
                self._counts[user] = self._counts.get(user, 0) + 1
        return [ToolUser(user, (user,), expected=n) for user, n in sorted(self._counts.items())]

    def skipped(self) -> dict[str, int]:
        """See `Reader.skipped`."""
        return dict(self._skipped)

    def read(self, user: ToolUser, known: ToolMemory) -> ToolMemory:
        """See `Reader.read`."""
        room = max(2 * (user.expected or 0), 1000)
        found = self._ask(
            lambda: self._memory.get_all(
                filters={"user_id": user.id}, top_k=room, show_expired=True
            )
        )
        results = found.get("results", []) if isinstance(found, dict) else found
        if len(results) >= room:
            raise SourceError(
                f"source mem0 '{self.source}': user '{user.id}' got many memories while they were "
                "read; run the same command again"
            )
        rows = checked(_ROWS, results, "mem0: Memory.get_all")
        return ToolMemory(facts(valid(rows, today())))

    def close(self) -> None:
        """See `Reader.close`."""
        # The library closes its history only, and a local Qdrant stays locked.
        store: Any = getattr(self._memory.vector_store, "client", None)
        parts: tuple[Any, ...] = (self._memory, store)
        for part in parts:
            if hasattr(part, "close"):
                part.close()

    def _ask(self, call: Any) -> Any:
        try:
            return call()
        except Exception as error:  # see above
            raise SourceError(
                f"source mem0 '{self.source}': the library failed ({type(error).__name__}); check "
                "that its vector store is up and run the same command again"
            ) from None


def _load(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        config = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"source mem0 '{path}': {reason}") from None
    except (ValueError, yaml.YAMLError):
        raise ConfigError(f"source mem0 '{path}': it is neither JSON nor YAML") from None
    if not isinstance(config, dict):
        raise ConfigError(f"source mem0 '{path}': it must hold an object of Mem0's settings")
    return config


def _rows(listed: Any) -> list[Any]:
    """The rows of what a vector store lists: some stores wrap them once more, or add a cursor."""
    if isinstance(listed, (list, tuple)) and listed and isinstance(listed[0], (list, tuple)):
        listed = listed[0]
    return list(listed or [])
