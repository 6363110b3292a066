"""From a chat request to its prompt: retrieval, residency, plan, lease and salt (API process)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from inferscale_runtime.config import RuntimeConfig
from inferscale_runtime.connector.capability import PARAMS_KEY, Claim, cache_salt, seal_claim
from inferscale_runtime.errors import StoreError
from inferscale_runtime.prompt.plan import PlannedFact, PromptPlan, order_facts, plan_prompt
from inferscale_runtime.prompt.template import Message
from inferscale_runtime.retrieval.search import top_k
from inferscale_runtime.server import metrics
from inferscale_runtime.server.options import MemoryOptions, MemoryUsage
from inferscale_runtime.server.session_plan import SessionPlanner
from inferscale_runtime.server.sessions import Layout
from inferscale_runtime.server.staging import shortfall
from inferscale_runtime.server.stores import UNREADABLE, OpenStore, ServedStore, find_user
from inferscale_runtime.server.users import UserView
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.leases import Lease
from inferscale_runtime.tracing import traced

logger = logging.getLogger("vllm.inferscale.memory")


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


@dataclass(frozen=True, slots=True)
class _Ask:
    """What a request brings along.

    Attributes:
        options: Its ``memory`` object.
        messages: Its messages, contents as text.
        arguments: Its chat template arguments.
        blocked: Why it must go as text whatever is resident, or None.
        nonce: Part of the salt, so that no other request meets its blocks; ``""`` for users'.
    """

    options: MemoryOptions
    messages: Sequence[Message]
    arguments: dict[str, Any]
    blocked: str | None = None
    nonce: str = ""


class MemoryService:
    """Plans requests; one per API process.

    Args:
        config: The server's settings.
        stores: By name, in the order in which they are asked.
        arena: Shared by all stores.
        secret: Key of capabilities and salts.
        refresh: Looks again for what the stores could not give so far; blocks.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        stores: Mapping[str, ServedStore],
        arena: Arena,
        secret: bytes,
        refresh: Callable[[], None],
    ) -> None:
        self._config = config
        self.secret = secret
        self._mismatched: set[tuple[str, str]] = set()
        self.open_requests: set[int] = set()  # users' requests that are not answered yet
        self.distrusted: set[str] = set()  # stores that the canary has served as text
        self.arena = arena
        self.stores = stores
        self.refresh = refresh
        self._sessions = SessionPlanner(config)

    @property
    def settled(self) -> bool:
        """Every store can be injected."""
        return all(served.settled for served in self.stores.values())

    def adopted(self) -> list[OpenStore]:
        """The stores that can be injected."""
        current = [served.current for served in self.stores.values()]
        return [opened for opened in current if opened and opened.identity.reason is None]

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
            UnknownStoreError: For a store that this server does not have.
            StoreError: When the user's facts cannot be read at all.
        """
        started = time.perf_counter()
        ask = _Ask(options, messages, arguments, blocked)
        opened, view, unasked = await self._find_user(options)
        if view is None and self._config.retrieval.unknown_user == "error":
            if unasked:
                raise StoreError("a store that may have this user cannot be read")
            raise UnknownUserError(options.user)
        best = await self._retrieve(opened, view, ask) if opened and view else []
        layout = None
        if opened is not None and view is not None:
            layout = self._sessions.resume(opened, view, options, messages, best)
        if opened is None or view is None or not (best or layout):
            reason = UNREADABLE if view is None and unasked else None
            prepared = self._plain(opened, ask, view, reason)
        else:
            chosen = order_facts(best, options.order or self._config.retrieval.order)
            prepared = await self._plan(opened, view, ask, chosen, layout)
        self._observe(prepared, started)
        self.open_requests.add(id(prepared))
        return prepared

    async def prepare_check(
        self,
        opened: OpenStore,
        options: MemoryOptions,
        messages: Sequence[Message],
        arguments: dict[str, Any],
    ) -> Prepared | None:
        """Plans a request for the canary: of a trusted store or not, and met by no user's request.

        Returns:
            The request, or None when nothing of it can be injected.
        """
        view = await asyncio.to_thread(opened.users.get, options.user, opened.identity.fingerprint)
        if view is None:
            return None
        options = options.model_copy(update={"session": None})
        ask = _Ask(options, messages, arguments, None, secrets.token_hex(16))
        best = await self._retrieve(opened, view, ask)
        chosen = order_facts(best, options.order or self._config.retrieval.order)
        prepared = await self._plan(opened, view, ask, chosen) if chosen else None
        return prepared if prepared is not None and prepared.lease is not None else None

    async def prepare_warm_up(
        self, opened: OpenStore, user: str, max_tokens: int
    ) -> Prepared | None:
        """Plans a request that tries injection and that nobody else can meet.

        Args:
            opened: An adopted store.
            user: One of its users.
            max_tokens: Most tokens that the engine takes with one more to come.

        Returns:
            The request, or None when nothing of this user can be injected.
        """
        view = await asyncio.to_thread(opened.users.get, user, opened.identity.fingerprint)
        if view is None or not view.segments:
            return None
        options = MemoryOptions(user=user, mode="injected", link_tail=0)
        messages: list[Message] = [{"role": "user", "content": "Hello"}]
        nonce = secrets.token_hex(16)
        ask = _Ask(options, messages, {"add_generation_prompt": True}, None, nonce)
        facts = view.memory.facts
        chosen = [n for n in range(len(facts)) if facts[n].id in view.segments]
        chosen = chosen[: max(1, self._config.retrieval.top_k)]
        while chosen:
            prepared = await self._plan(opened, view, ask, chosen)
            if prepared.lease is None or prepared.token_ids is None:
                return None
            if len(prepared.token_ids) < max_tokens:
                return prepared
            self.end(prepared, submitted=False)
            chosen = chosen[: len(chosen) // 2]
        return None

    def end(self, prepared: Prepared, *, submitted: bool = True) -> None:
        """Ends the request's lease."""
        self.open_requests.discard(id(prepared))
        if prepared.lease is not None:
            self.arena.end(prepared.lease, submitted=submitted)

    def forget_sessions(self, store: str, user: str) -> None:
        """Forgets what the chats of a user have in their prompts."""
        self._sessions.sessions.forget((store, user))

    @traced("memory.open")
    async def _find_user(
        self, options: MemoryOptions
    ) -> tuple[OpenStore | None, UserView | None, bool]:
        return await asyncio.to_thread(find_user, self.stores, options.store, options.user)

    @traced("memory.retrieve")
    async def _retrieve(self, opened: OpenStore, view: UserView, ask: _Ask) -> list[int]:
        """Indexes of the user's facts for this question, best first."""
        retrieval = self._config.retrieval
        k = retrieval.top_k if ask.options.k is None else ask.options.k
        question = next(
            (
                str(m.get("content") or "")
                for m in reversed(ask.messages)
                if m.get("role") == "user"
            ),
            "",
        )
        if k == 0 or not view.memory.facts:
            return []
        if opened.questions is not None and view.memory.embedder == opened.embedder:
            query = await opened.questions.embed(question)
            return list(top_k(query, view.memory.embeddings, k, retrieval.min_score))
        name = (opened.entry.name, view.memory.user)
        if name not in self._mismatched:
            self._mismatched.add(name)
            logger.warning(
                "store '%s': embedded with %r, the server has %r; the newest facts are used. "
                "Encode again or serve with the same embedder",
                opened.entry.name,
                view.memory.embedder,
                opened.embedder,
            )
        return list(range(len(view.memory.facts)))[::-1][:k]

    @traced("memory.plan")
    async def _plan(
        self,
        opened: OpenStore,
        view: UserView,
        ask: _Ask,
        chosen: Sequence[int],
        layout: Layout | None = None,
    ) -> Prepared:
        options, identity = ask.options, opened.identity
        link_tail = (
            self._config.retrieval.link_tail if options.link_tail is None else options.link_tail
        )
        inject = options.mode == "injected"
        messages = ask.messages
        if layout is not None:
            chosen, messages = layout.base, self._sessions.noted(opened, view, messages, layout)
        halves = identity.template.split(messages, identity.preamble.role, ask.arguments)
        if halves is None:
            return self._plain(opened, ask, view, "template")
        before = tuple(identity.template.tokenize(halves[0]))
        tail = identity.template.tokenize(halves[1])
        reason = ask.blocked or identity.reason
        if not ask.nonce and opened.entry.name in self.distrusted:
            reason = reason or "canary"
        if before != identity.preamble.token_ids:
            reason = reason or "preamble_mismatch"
        if reason:
            inject = False
        fixed = layout.claimable if layout is not None else None
        wanted = chosen[: max(0, len(chosen) - link_tail) if fixed is None else fixed]
        facts = view.memory.facts
        segments = [view.segments[facts[n].id] for n in wanted if facts[n].id in view.segments]
        tier = None
        usable = {s.key for s in segments}
        # What other requests read meanwhile must not push out what this one waits with.
        with self.arena.holding([*usable] if inject else ()):
            if inject:
                # The warm-up is no user's request: it must not make a store look used.
                keys, name, arena = [*usable], opened.entry.name, self.arena
                found = arena.resident(keys) if ask.nonce else arena.look_up(keys, store=name)
                tier = "dram" if found == usable else "disk"
                late = await opened.staging.ensure(options.user, view, segments)
                resident = self.arena.resident([*usable])
                reason = shortfall(view, len(wanted) - len(segments), usable, resident, late)
                usable = resident
            planned = [
                PlannedFact(
                    n, view.token_ids(n, identity.template), self._usable_key(view, n, usable)
                )
                for n in chosen
            ]
            lay_out = partial(plan_prompt, before, planned, tail, link_tail=link_tail, fixed=fixed)
            plan = lay_out(inject=inject)
            lease = None
            if inject and not plan.keys:
                # Claiming the preamble alone would be no memory injected: say what it is.
                reason = reason or ("link_tail" if layout is None else "session")
                plan = lay_out(inject=False)
            elif inject:
                lease = self.arena.acquire((opened.preamble_key, *plan.keys))
                if lease is None:
                    reason = "evicted"
                    plan = lay_out(inject=False)
        sealed = self._seal(opened, ask, view, plan, lease, tier if lease else None, reason)
        noted = [n for found in layout.notes.values() for n in found] if layout else []
        used = tuple(facts[n].id for n in (*plan.order, *noted))
        usage = replace(sealed.usage, fact_ids=used, explain=options.explain)
        sealed = replace(sealed, usage=usage)
        if options.session is None:
            return sealed
        usage = self._sessions.keep(opened, view, options, layout, plan, sealed.usage)
        return replace(sealed, usage=usage)

    @staticmethod
    def _usable_key(view: UserView, index: int, usable: set[str]) -> str | None:
        segment = view.segments.get(view.memory.facts[index].id)
        return segment.key if segment is not None and segment.key in usable else None

    def _salt(
        self,
        opened: OpenStore | None,
        ask: _Ask,
        view: UserView | None,
        keys: Sequence[str],
        mode: str,
    ) -> str:
        tenant = f"{opened.entry.name} {opened.entry.url}" if opened else ""
        fingerprint = opened.identity.fingerprint if opened else ""
        if ask.nonce:
            mode = f"{mode} {ask.nonce}"
        epoch = view.memory.epoch if view else 0
        return cache_salt(self.secret, tenant, ask.options.user, fingerprint, keys, mode, epoch)

    def _plain(
        self, opened: OpenStore | None, ask: _Ask, view: UserView | None, reason: str | None
    ) -> Prepared:
        version = view.memory.version if view else 0
        name = opened.entry.name if opened and version else None
        usage = MemoryUsage(
            "none", store_version=version, reason=reason, store=name, explain=ask.options.explain
        )
        return Prepared(None, self._salt(opened, ask, view, (), "none"), {}, None, usage)

    def _seal(
        self,
        opened: OpenStore,
        ask: _Ask,
        view: UserView,
        plan: PromptPlan,
        lease: Lease | None,
        tier: Any,
        reason: str | None,
    ) -> Prepared:
        usage = MemoryUsage(
            mode="text" if lease is None else "injected",
            facts=plan.num_facts,
            injected_tokens=0 if lease is None else plan.num_claimed,
            text_tokens=plan.num_text_tokens,
            tier=tier,
            store_version=view.memory.version,
            reason=reason,
            store=opened.entry.name,
        )
        if lease is None:
            salt = self._salt(opened, ask, view, (), "text")
            return Prepared(plan.token_ids, salt, {}, None, usage)
        salt = self._salt(opened, ask, view, plan.keys, "injected")
        claim = Claim(plan.num_claimed, lease.runs, lease.slot, lease.generation)
        params = {PARAMS_KEY: seal_claim(self.secret, claim, salt, plan.token_ids)}
        return Prepared(plan.token_ids, salt, params, lease, usage)

    def _observe(self, prepared: Prepared, started: float) -> None:
        usage = prepared.usage
        metrics.REQUESTS.labels(usage.mode, usage.reason or "").inc()
        metrics.INJECTED_TOKENS.inc(usage.injected_tokens)
        metrics.PLAN_SECONDS.observe(time.perf_counter() - started)
