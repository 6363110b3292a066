"""What has been measured already, kept in files: a run that was stopped goes on where it was.

Several runs may use one folder at a time: files are replaced as a whole, lines are appended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inferscale_runtime.fingerprint import canonical_digest


class TextCache:
    """Distributions of prompts without injected memory, which no setting changes.

    Args:
        folder: Where they are kept, 4 bytes a token of the vocabulary and position.
        identity: Everything beside the prompt that they depend on.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._identity = identity
        folder.mkdir(parents=True, exist_ok=True)

    def get(
        self, token_ids: list[int], positions: int, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The distributions at the last positions of a prompt, computed when they are not there."""
        key = canonical_digest([self._identity, token_ids, positions])
        file = self._folder / f"{key}.npy"
        if file.exists():
            return torch.from_numpy(np.load(file))
        found = compute()
        building = file.with_suffix(f".{os.getpid()}")
        with building.open("wb") as stream:
            np.save(stream, found.numpy())
        building.replace(file)
        return found


class Results:
    """Measured values by key, one JSON line each."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._values: dict[str, dict[str, Any]] = {}
        if file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                # The last line of a killed run may be cut.
                if line.endswith("}}"):
                    entry = json.loads(line)
                    self._values[entry["key"]] = entry["values"]

    def get(self, key: str) -> dict[str, Any] | None:
        """What was measured, or None."""
        return self._values.get(key)

    def put(self, key: str, values: dict[str, Any]) -> None:
        """Keeps values; they are on disk when this returns."""
        self._values[key] = values
        line = json.dumps({"key": key, "values": values}, ensure_ascii=False)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(f"\n{line}\n")
