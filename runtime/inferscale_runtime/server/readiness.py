"""When the server may get traffic: ``GET /inferscale/v1/ready``.

Readiness comes once and stays: what happens to a store later is told by the status, and must not
take a serving pod away from its users. Only a dead engine ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

from inferscale_runtime.config import TierConfig
from inferscale_runtime.server.canary import Canary
from inferscale_runtime.server.service import MemoryService
from inferscale_runtime.server.stores import UNREADABLE, ServedStore
from inferscale_runtime.server.warmup import Preload, warm_up_request

logger = logging.getLogger("vllm.inferscale.readiness")

REFRESH_SECONDS = 10.0
"""How often a server looks again for what it could not use so far (arbitrary)."""


SWEEP_SECONDS = 10.0
"""How often a server looks for users that were changed or erased and that nobody asks for."""
SWEEP_SHARE = 0.2
"""Most of the time that this may take: on object storage each user costs a request (arbitrary)."""


async def keep_swept(service: MemoryService) -> None:
    """Forgets in memory what the stores have no longer, as long as the server runs."""
    while True:
        started = time.monotonic()
        for served in service.stores.values():
            await asyncio.to_thread(served.sweep)
        took = time.monotonic() - started
        await asyncio.sleep(max(SWEEP_SECONDS, took / SWEEP_SHARE - took))


def blocking_reason(stores: Iterable[ServedStore]) -> str | None:
    """Which store still has to be waited for.

    A store that is not encoded yet, or cannot be opened, is waited for only when the settings name
    the fingerprint that it will have: another store's users need the server meanwhile.
    """
    for served in stores:
        reason = served.reason
        name = f"store '{served.entry.name}'"
        pinned = served.entry.expected_fingerprint is not None
        if reason is not None and (pinned or reason not in ("not_encoded", UNREADABLE)):
            return f"{name}: {reason}"
        if served.embedder_problem is not None:
            return f"{name}: {served.embedder_problem}"
    return None


class Readiness:
    """Brings the server to readiness and keeps looking after its stores.

    Args:
        service: Has the stores.
        engine: vLLM's engine client.
        tiers: Whether and how much to preload.
        canary: Checks the stores before the server is ready, or None.
    """

    def __init__(
        self,
        service: MemoryService,
        engine: Any,
        tiers: TierConfig,
        canary: Canary | None = None,
    ) -> None:
        self._canary = canary
        self._service = service
        self._engine = engine
        self._tiers = tiers
        self._reason: str | None = "starting"
        self._preload: asyncio.Task[None] | None = None

    @property
    def reason(self) -> str | None:
        """Why the server is not ready, or None."""
        if getattr(self._engine, "errored", False):
            return "the engine is dead"
        return self._reason

    async def keep(self) -> None:
        """Runs as long as there is something to do."""
        while True:
            if self._reason is not None:
                await self._advance()
            if self._reason is None and self._service.settled:
                return
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await asyncio.to_thread(self._service.refresh)
            except Exception:
                # This task must outlive any store; the status names what is missing.
                logger.exception("a store could not be taken into use")

    async def _advance(self) -> None:
        self._reason = blocking_reason(self._service.stores.values())
        if self._reason is not None:
            return
        self._reason = "warming up"
        try:
            injected = await warm_up_request(self._service, self._engine)
        except Exception as error:
            logger.exception("the warm-up request failed")
            self._reason = f"the warm-up request failed: {type(error).__name__}"
            return
        if self._tiers.warm:
            await self._fill()
        if self._canary is not None:
            await self._canary.start()
        logger.info("ready; %s", "injection tried" if injected else "no user to try injection with")
        self._reason = None

    async def _fill(self) -> None:
        arena = self._service.arena
        budget = self._tiers.warm_bytes
        if budget is None:
            budget = arena.budget_bytes // 2
        preload = Preload(self._service.adopted(), arena, min(budget, arena.budget_bytes))
        self._preload = asyncio.create_task(asyncio.to_thread(preload.run))
        self._preload.add_done_callback(_log_failure)
        await asyncio.wait({self._preload}, timeout=self._tiers.warm_timeout_ms / 1000)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        # The arena fills with requests then, as it would have without this.
        logger.warning("preloading stopped: %s", type(task.exception()).__name__)
