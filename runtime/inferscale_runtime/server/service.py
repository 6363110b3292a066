"""From a chat request to its prompt: retrieval, residency, plan, lease and salt (API process)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inferscale_runtime.config import DEFAULT_STORE_NAME, RuntimeConfig
from inferscale_runtime.connector.capability import PARAMS_KEY, Claim, cache_salt, seal_claim
from inferscale_runtime.errors import StoreError
from inferscale_runtime.prompt.plan import PlannedFact, PromptPlan, order_facts, plan_prompt
from inferscale_runtime.prompt.template import Message
from inferscale_runtime.retrieval.batcher import EmbeddingBatcher
from inferscale_runtime.retrieval.embedder import Embedder
from inferscale_runtime.retrieval.search import top_k
from inferscale_runtime.server import metrics
from inferscale_runtime.server.identity import Identity
from inferscale_runtime.server.options import MemoryOptions, MemoryUsage
from inferscale_runtime.server.staging import Staging
from inferscale_runtime.server.users import UserCache, UserView
from inferscale_runtime.store.store import Store
from inferscale_runtime.tiers.arena import Arena, Lease

logger = logging.getLogger("vllm.inferscale.memory")

PREAMBLE_KEY = "preamble"


class UnknownUserError(Exception):
    """The user has no memory and the server was told to refuse that."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is put on a request before the stock handler takes it.

    Attributes:
        token_ids: The whole prompt, or None when the conversation goes as it is.
        salt: Cache salt.
        params: ``kv_transfer_params`` beside the token ids.
        lease: To be ended when the response is over, or None.
        usage: For the answer.
    """

    token_ids: list[int] | None
    salt: str
    params: dict[str, Any]
    lease: Lease | None
    usage: MemoryUsage


class MemoryService:
    """Plans requests; one per API process."""

    def __init__(
        self,
        config: RuntimeConfig,
        store: Store,
        arena: Arena,
        secret: bytes,
        identity: Identity,
        embedder: Embedder,
    ) -> None:
        self._config = config
        self._arena = arena
        self._secret = secret
        self._embedder = embedder
        self._users = UserCache(store)
        self._staging = Staging(store, arena, config.tiers.stage_timeout_ms / 1000)
        self._questions = EmbeddingBatcher(embedder)
        self._mismatched: set[str] = set()
        self.identity = identity
        self.adopt(identity)

    def adopt(self, identity: Identity) -> None:
        """Takes a fingerprint into use; its preamble stays resident for good."""
        if identity.preamble_kv is not None:
            key = self._key(identity.fingerprint, PREAMBLE_KEY)
            if not self._arena.put(key, identity.preamble_kv, pin=True):
                raise StoreError(
                    "tiers.dram_bytes: the preamble does not fit; make the arena larger"
                )
        self.identity = identity

    @staticmethod
    def _key(fingerprint: str, name: str) -> str:
        return f"{fingerprint}/{name}"

    async def prepare(
        self,
        options: MemoryOptions,
        messages: Sequence[Message],
        arguments: dict[str, Any],
        blocked: str | None,
    ) -> Prepared:
        """Plans one request.

        Args:
            options: The request's ``memory`` object.
            messages: Its messages, contents as text.
            arguments: Its chat template arguments.
            blocked: Why it must go as text whatever is resident, or None.

        Returns:
            What to put on the request.

        Raises:
            UnknownUserError: For a user without memory, if configured so.
            StoreError: When the user's facts cannot be read at all.
        """
        started = time.perf_counter()
        identity = self.identity
        view = await asyncio.to_thread(self._users.get, options.user, identity.fingerprint)
        if view is None and self._config.retrieval.unknown_user == "error":
            raise UnknownUserError(options.user)
        chosen = await self._retrieve(view, options, messages) if view else []
        if view is None or not chosen:
            prepared = self._plain(options, view.memory.version if view else 0, None)
        else:
            prepared = await self._plan(
                identity, view, options, chosen, messages, arguments, blocked
            )
        self._observe(prepared, started)
        return prepared

    @property
    def arena(self) -> Arena:
        """The DRAM arena."""
        return self._arena

    def end(self, prepared: Prepared, *, submitted: bool = True) -> None:
        """Ends the request's lease."""
        if prepared.lease is not None:
            self._arena.end(prepared.lease, submitted=submitted)

    async def _retrieve(
        self, view: UserView, options: MemoryOptions, messages: Sequence[Message]
    ) -> list[int]:
        k = self._config.retrieval.top_k if options.k is None else options.k
        question = next(
            (str(m.get("content") or "") for m in reversed(messages) if m.get("role") == "user"), ""
        )
        if k == 0 or not view.memory.facts:
            return []
        if view.memory.embedder == self._embedder.name:
            query = await self._questions.embed(question)
            best = top_k(query, view.memory.embeddings, k, self._config.retrieval.min_score)
        else:
            if view.memory.user not in self._mismatched:
                self._mismatched.add(view.memory.user)
                logger.warning(
                    "store: embedded with %r, the server has %r; the newest facts are used. "
                    "Encode again or serve with the same embedder",
                    view.memory.embedder,
                    self._embedder.name,
                )
            best = list(range(len(view.memory.facts)))[::-1][:k]
        return order_facts(best, options.order or self._config.retrieval.order)

    async def _plan(
        self,
        identity: Identity,
        view: UserView,
        options: MemoryOptions,
        chosen: list[int],
        messages: Sequence[Message],
        arguments: dict[str, Any],
        blocked: str | None,
    ) -> Prepared:
        link_tail = (
            self._config.retrieval.link_tail if options.link_tail is None else options.link_tail
        )
        inject = options.mode == "injected"
        halves = identity.template.split(messages, identity.preamble.role, arguments)
        if halves is None:
            return self._plain(options, view.memory.version, "template")
        before = tuple(identity.template.tokenize(halves[0]))
        tail = identity.template.tokenize(halves[1])
        reason = blocked or identity.reason
        if before != identity.preamble.token_ids:
            reason = reason or "preamble_mismatch"
        if reason:
            inject = False
        wanted = chosen[: max(0, len(chosen) - link_tail)]
        facts = view.memory.facts
        segments = [view.segments[facts[n].id] for n in wanted if facts[n].id in view.segments]
        tier = None
        usable = {s.key for s in segments}
        if inject:
            found = self._arena.look_up([*usable], store=DEFAULT_STORE_NAME)
            tier = "dram" if found == usable else "disk"
            late = await self._staging.ensure(options.user, view, segments)
            resident = self._arena.resident([*usable])
            reason = self._shortfall(view, len(wanted) - len(segments), usable, resident, late)
            usable = resident
        planned = [
            PlannedFact(n, view.token_ids(n, identity.template), self._usable_key(view, n, usable))
            for n in chosen
        ]
        plan = plan_prompt(before, planned, tail, link_tail=link_tail, inject=inject)
        lease = None
        if inject and not plan.keys:
            # Claiming the preamble alone would be no memory injected: say what it is.
            reason = reason or "link_tail"
            plan = plan_prompt(before, planned, tail, link_tail=link_tail, inject=False)
        elif inject:
            keys = (self._key(identity.fingerprint, PREAMBLE_KEY), *plan.keys)
            lease = self._arena.acquire(keys)
            if lease is None:
                reason = "evicted"
                plan = plan_prompt(before, planned, tail, link_tail=link_tail, inject=False)
        return self._seal(options, view, plan, lease, tier if lease else None, reason)

    @staticmethod
    def _usable_key(view: UserView, index: int, usable: set[str]) -> str | None:
        segment = view.segments.get(view.memory.facts[index].id)
        return segment.key if segment is not None and segment.key in usable else None

    @staticmethod
    def _shortfall(
        view: UserView, missing: int, wanted: set[str], resident: set[str], late: str | None
    ) -> str | None:
        """Why some of the wanted segments go as text, or None; counts them."""
        if missing:
            metrics.UNUSABLE_SEGMENTS.labels("missing").inc(missing)
        if late == "timeout":
            metrics.UNUSABLE_SEGMENTS.labels("timeout").inc()
        if wanted & view.damaged:
            return "segment_damaged"
        if late or missing:
            return late or "segment_missing"
        return "evicted" if resident != wanted else None

    def _salt(self, user: str, keys: Sequence[str], mode: str) -> str:
        return cache_salt(
            self._secret, self._config.store, user, self.identity.fingerprint, keys, mode
        )

    def _plain(self, options: MemoryOptions, version: int, reason: str | None) -> Prepared:
        usage = MemoryUsage("none", store_version=version, reason=reason)
        return Prepared(None, self._salt(options.user, (), "none"), {}, None, usage)

    def _seal(
        self,
        options: MemoryOptions,
        view: UserView,
        plan: PromptPlan,
        lease: Lease | None,
        tier: Any,
        reason: str | None,
    ) -> Prepared:
        if lease is None:
            salt = self._salt(options.user, (), "text")
            usage = MemoryUsage(
                "text", plan.num_facts, 0, plan.num_text_tokens, None, view.memory.version, reason
            )
            return Prepared(plan.token_ids, salt, {}, None, usage)
        salt = self._salt(options.user, plan.keys, "injected")
        claim = Claim(plan.num_claimed, lease.runs, lease.slot, lease.generation)
        params = {PARAMS_KEY: seal_claim(self._secret, claim, salt, plan.token_ids)}
        usage = MemoryUsage(
            "injected",
            plan.num_facts,
            plan.num_claimed,
            plan.num_text_tokens,
            tier,
            view.memory.version,
            reason,
        )
        return Prepared(plan.token_ids, salt, params, lease, usage)

    def _observe(self, prepared: Prepared, started: float) -> None:
        usage = prepared.usage
        metrics.REQUESTS.labels(usage.mode, usage.reason or "").inc()
        metrics.INJECTED_TOKENS.inc(usage.injected_tokens)
        metrics.PLAN_SECONDS.observe(time.perf_counter() - started)
