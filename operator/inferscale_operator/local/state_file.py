"""Objects of a ``MemoryCluster`` in a JSON file, replaced atomically (I/O)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FORMAT = 1


class StateError(Exception):
    """The file cannot be used."""


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes the file; a crash leaves the old or the new one. Only the user may read it."""
    temporary = path.with_name(f"{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump({"format": FORMAT, **state}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def load_state(path: Path) -> dict[str, Any] | None:
    """Reads the file; None when there is none.

    Raises:
        StateError: For a file that this release cannot read.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StateError(f"{path}: not JSON ({error}); move the file away to start anew") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StateError(f"{path}: not of format {FORMAT}; move the file away to start anew")
    return document
