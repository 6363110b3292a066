"""What a server does before it gets traffic: one request with injection, and a filled arena."""

from __future__ import annotations

import asyncio
import heapq
import logging
import secrets
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from inferscale_runtime.server.service import MemoryService
from inferscale_runtime.server.stores import OpenStore
from inferscale_runtime.server.users import MAX_CACHED_USERS
from inferscale_runtime.tiers.arena import Arena

logger = logging.getLogger("vllm.inferscale.warmup")

_TRIES = 3
_BATCH_SEGMENTS = 64
"""Segments read at once, so that a stop is noticed soon (arbitrary)."""


def recent(stores: Sequence[OpenStore]) -> Iterator[tuple[OpenStore, str]]:
    """Users of all stores, the last written first."""

    def of(place: int, opened: OpenStore) -> Iterator[tuple[float, int, str]]:
        for written, user in opened.store.recent_users():
            yield -written, place, user

    streams = [of(place, opened) for place, opened in enumerate(stores)]
    for _, place, user in heapq.merge(*streams):
        yield stores[place], user


async def warm_up_request(service: MemoryService, engine: Any) -> bool:
    """Sends a request of one token with injected memory through the engine.

    It counts in no metric of requests, and its salt is random: no other request can meet its
    blocks in the prefix cache.

    Returns:
        False when no user can be injected.
    """
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    stores = service.adopted()
    users = await asyncio.to_thread(lambda: list(islice(recent(stores), _TRIES)))
    max_tokens = int(engine.vllm_config.model_config.max_model_len)
    for opened, user in users:
        prepared = await service.prepare_warm_up(opened, user, max_tokens)
        if prepared is None or prepared.token_ids is None:
            continue
        params = SamplingParams(
            max_tokens=1, temperature=0, extra_args={"kv_transfer_params": prepared.params}
        )
        prompt = tokens_input(prepared.token_ids, cache_salt=prepared.salt)
        name = f"inferscale-warm-up-{secrets.token_hex(8)}"
        try:
            async for _ in engine.generate(prompt, params, name):
                pass
        finally:
            service.end(prepared)
        return True
    return False


class Preload:
    """Fills the arena with the segments of the users that were written last.

    Args:
        stores: The adopted stores.
        arena: Where they go.
        budget_bytes: Most bytes that the arena may hold afterwards.
    """

    def __init__(self, stores: Sequence[OpenStore], arena: Arena, budget_bytes: int) -> None:
        self._stores = stores
        self._arena = arena
        self._budget = budget_bytes
        self.users = 0
        self.stopped = False

    def run(self) -> None:
        """Reads until the budget is used; blocks, in a thread of its own."""
        for opened, user in recent(self._stores):
            if self.stopped or self.users >= MAX_CACHED_USERS or not self._load(opened, user):
                break
            self.users += 1
        logger.info("the arena holds the segments of %d users from the start", self.users)

    def _load(self, opened: OpenStore, user: str) -> bool:
        """Loads one user; False when there is no room for all of it."""
        view = opened.users.get(user, opened.identity.fingerprint)
        if view is None:
            return True
        segments = list(view.segments.values())
        rows = sum(segment.num_tokens for segment in segments)
        if (self._arena.used_rows + rows) * self._arena.row_bytes > self._budget:
            return False
        for start in range(0, len(segments), _BATCH_SEGMENTS):
            if self.stopped:
                return False
            opened.staging.read(user, view, segments[start : start + _BATCH_SEGMENTS])
        return True
