"""The GPU arena at work in one worker: upkeep beside the engine's steps, figures for the server.

A thread of its own follows the plan file's GPU budget, forgets copies of rows that were freed
(their facts may have been erased, so this must not wait for the next request), and writes the
figures to a small file in the run folder; the API process reads it. One lock keeps the thread and
the engine's steps apart, and on a GPU the thread's work is queued on the stream that reads.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from inferscale_runtime.tiers.device_arena import DeviceArena, DeviceFigures, Run
from inferscale_runtime.tiers.plan_file import MAX_PLAN_BYTES, read_plan

logger = logging.getLogger("vllm.inferscale.tiers")

KEEP_SECONDS = 2.0
"""Between two rounds of upkeep: as often as the API process looks at the plan."""

_PREFIX = "device-"
_FIELDS = tuple(field.name for field in fields(DeviceFigures))


class DeviceTier:
    """One rank's GPU arena with its upkeep.

    Args:
        arena: The arena; nobody else uses it.
        run_dir: The server's shared-memory files.
        rank: Of this worker.
        plan_file: Path, or empty.
    """

    def __init__(self, arena: DeviceArena, run_dir: Path, rank: int, plan_file: str = "") -> None:
        self._arena = arena
        self._file = run_dir / f"{_PREFIX}{rank}.json"
        self._plan_file = plan_file
        self._lock = threading.Lock()
        self._stream: Any = None
        self._plan_seen: bytes | None = None
        self._told: DeviceFigures | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def device(self) -> torch.device:
        """Where the rows are brought."""
        return self._arena.device

    def fetch(self, runs: Sequence[Run]) -> torch.Tensor:
        """See ``DeviceArena.fetch``."""
        with self._lock:
            if torch.cuda.is_available() and self._arena.device.type == "cuda":
                self._stream = torch.cuda.current_stream(self._arena.device)
            return self._arena.fetch(runs)

    def keep(self) -> None:
        """One round of upkeep."""
        plan = self._changed_plan()
        with self._lock, torch.cuda.stream(self._stream) if self._stream else nullcontext():
            if plan is not None:
                self._follow(plan)
            self._arena.sweep()
            figures = self._arena.figures
        if figures != self._told:
            self._tell(figures)
            self._told = figures

    def _changed_plan(self) -> bytes | None:
        if not self._plan_file:
            return None
        try:
            with open(self._plan_file, "rb") as stream:
                text = stream.read(MAX_PLAN_BYTES + 1)
        except OSError:
            return None  # the last plan stays; the API process says why
        return None if text == self._plan_seen else text

    def _follow(self, text: bytes) -> None:
        self._plan_seen = text
        try:
            plan = read_plan(text)
        except ValueError:
            return  # as above
        self._arena.set_budget(plan.gpu_bytes)

    def _tell(self, figures: DeviceFigures) -> None:
        fresh = self._file.with_suffix(".tmp")
        with open(fresh, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as stream:
            json.dump(asdict(figures), stream)
        fresh.replace(self._file)

    def start(self, seconds: float = KEEP_SECONDS) -> None:
        """Keeps up in a thread until ``stop``."""

        def run() -> None:
            while True:
                try:
                    self.keep()
                except Exception:
                    # The run folder goes before the worker does when the server ends.
                    if self._file.parent.is_dir():
                        logger.exception("GPU arena: one round failed; the next one follows")
                if self._stop.wait(seconds):
                    return

        self._stop.clear()
        self._thread = threading.Thread(target=run, name="inferscale-device", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


def read_device_figures(run_dir: Path) -> DeviceFigures | None:
    """What the workers' GPU arenas said last.

    Returns:
        Of each figure the largest of all ranks: they hold the same segments, each its own heads.
        None without a GPU arena, and before the first injection.
    """
    found = []
    for path in sorted(run_dir.glob(f"{_PREFIX}*.json")):
        try:
            values = json.loads(path.read_text())
            found.append(tuple(int(values[name]) for name in _FIELDS))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return DeviceFigures(*map(max, zip(*found, strict=True))) if found else None
