"""Follows the plan file: the budgets that the operator gives this server while it runs.

The file is a mounted ConfigMap, which changes by a swap of links, or a file written by hand; it is
read every two seconds and compared by content. A missing or broken plan keeps the last one and is a
state with a reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from inferscale_runtime.config import TierPlan
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.arena_use import ByteLimits

logger = logging.getLogger("vllm.inferscale.tiers")

POLL_SECONDS = 2.0
"""Between two looks at the file (a ConfigMap volume itself follows within about a minute)."""

MAX_PLAN_BYTES = 1 << 20
"""A ConfigMap is not larger."""


@dataclass(frozen=True, slots=True)
class PlanState:
    """What became of the plan file.

    Attributes:
        file: Its path; empty when no plan is followed.
        applied_at: Unix time of the last plan that was taken, or None.
        reason: Why the file's present content is not in use, or None.
    """

    file: str
    applied_at: float | None = None
    reason: str | None = None


def read_plan(text: bytes) -> TierPlan:
    """Parses a plan.

    Raises:
        ValueError: One line that names the field.
    """
    if len(text) > MAX_PLAN_BYTES:
        raise ValueError(f"larger than {MAX_PLAN_BYTES} bytes")
    try:
        return TierPlan.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "document"
        raise ValueError(f"field '{field}': {first['msg']}") from None


class PlanFollower:
    """Applies the plan to the arena, once for each change of the file.

    Args:
        path: The file; empty follows none.
        arena: Takes the limits.
        clock: Unix time in seconds.
    """

    def __init__(self, path: str, arena: Arena, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._arena = arena
        self._clock = clock
        self._seen: bytes | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.state = PlanState(path)

    def poll(self) -> None:
        """Looks at the file once, and frees what ended requests held."""
        if self._path:
            self._follow()
        self._arena.collect()

    def _follow(self) -> None:
        try:
            with open(Path(self._path), "rb") as stream:
                text = stream.read(MAX_PLAN_BYTES + 1)
        except OSError as error:
            self._seen = None
            self._refuse(f"{error.strerror or error}")
            return
        if text == self._seen:
            return
        self._seen = text
        try:
            plan = read_plan(text)
        except ValueError as error:
            self._refuse(str(error))
            return
        limits = {
            name: ByteLimits(share.floor_bytes, share.ceiling_bytes, share.tier)
            for name, share in plan.stores.items()
        }
        self._arena.set_limits(plan.dram_bytes, limits)
        self.state = PlanState(self._path, self._clock(), None)
        logger.info("plan file: applied, %d stores", len(limits))

    def _refuse(self, reason: str) -> None:
        if reason != self.state.reason:
            logger.warning("plan file '%s': %s; the last plan stays", self._path, reason)
        self.state = PlanState(self._path, self.state.applied_at, reason)

    def start(self, seconds: float = POLL_SECONDS) -> None:
        """Polls in a thread until ``stop``."""

        def run() -> None:
            while True:
                try:
                    self.poll()
                except Exception:
                    logger.exception("plan file: one look failed; the next one follows")
                if self._stop.wait(seconds):
                    return

        self._stop.clear()
        self._thread = threading.Thread(target=run, name="inferscale-tiers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
