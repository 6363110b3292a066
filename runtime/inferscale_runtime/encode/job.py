"""The encoding job: input file to store, resumable at any point.

First the facts themselves are committed (with what may no longer be injected taken out), then
segments in batches; whatever was committed before a kill is not encoded again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from inferscale_runtime.config import RuntimeConfig
from inferscale_runtime.encode.changes import EncodePlan, plan_encoding
from inferscale_runtime.encode.committer import FactsCommitter
from inferscale_runtime.encode.engine import EncodeEngine, EncodeRequest
from inferscale_runtime.encode.input import UserInput
from inferscale_runtime.encode.limits import StoreBudget, refuse_many_facts
from inferscale_runtime.encode.model import (
    make_fingerprint,
    make_template,
    model_figures,
    resolve_model,
)
from inferscale_runtime.encode.policies import ContextPolicy, parse_policy
from inferscale_runtime.encode.shards import in_shard
from inferscale_runtime.encode.status import EncodeStatus, ProgressLines
from inferscale_runtime.encode.stop import StopSignal
from inferscale_runtime.errors import InputError
from inferscale_runtime.fingerprint import Fingerprint, model_digest
from inferscale_runtime.packing.rows import channel_exponents, pack
from inferscale_runtime.prompt.template import Template
from inferscale_runtime.store.living import add_segments
from inferscale_runtime.store.records import UserMemory
from inferscale_runtime.store.store import NewSegment, Store
from inferscale_runtime.store.tensors import StoredKV

logger = logging.getLogger("inferscale.encode")

_AGAIN = 3
"""Repetitions for facts that were changed while they were read (arbitrary)."""
COMMIT_FACTS = 64
"""Segments a commit; a kill loses at most the work on so many facts (arbitrary)."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """vLLM's side of an encoding job.

    Attributes:
        model: Built-in name, folder or hub id.
        revision: Of a hub id.
        dtype: vLLM dtype.
        max_model_len: Longest prompt, or None for the model's own.
        chat_template: Template text that replaces the tokenizer's own, or None.
        kv_cache_bytes: Size of the engine's KV cache.
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    chat_template: str | None = None
    kv_cache_bytes: int = 1 << 30
    revision: str | None = None


@dataclass(slots=True)
class EncodeReport:
    """What a job did; the counts are those of this shard only.

    Attributes:
        fingerprint: Digest that the segments belong to.
        shard: ``i/n``.
        users: Users of this shard in the input.
        facts: Their facts.
        encoded: Facts read in this run.
        removed: Facts that these users had before and have no longer.
        too_long: Facts that are longer than the model allows; they are served as text.
        expired: Facts that retention left out of the input or, of the memory API, deleted.
        tokens: Tokens read in this run, context included.
        computed_tokens: Those of them that the prefix cache did not have, with the preamble's.
        seconds: Time of the whole run.
        store_bytes: Bytes of this shard's users in the store, in the input or not.
        model: Shape of the model: ``num_layers``, ``num_attention_heads``, ``num_kv_heads``,
            ``head_dim``, ``dtype`` of the KV, ``weight_bytes`` of the files.
    """

    fingerprint: str
    shard: str = "0/1"
    users: int = 0
    facts: int = 0
    encoded: int = 0
    removed: int = 0
    too_long: int = 0
    expired: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    seconds: float = 0.0
    store_bytes: int = 0
    model: dict[str, int | str] = field(default_factory=dict)


def _engine_config(options: ModelOptions, folder: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        folder, dtype=options.dtype, max_model_len=options.max_model_len, enforce_eager=True
    )
    return arguments.create_engine_config()


class EncodeJob:
    """One run of ``inferscale encode``.

    Args:
        config: Settings; one store.
        options: vLLM's side.
        status: Learns how far the job is.
        stop: Tells when SIGTERM came.
    """

    def __init__(
        self, config: RuntimeConfig, options: ModelOptions, status: EncodeStatus, stop: StopSignal
    ) -> None:
        from transformers import AutoTokenizer

        self._policy: ContextPolicy = parse_policy(config.encoding.policy)
        self._store = Store.open(config.store, create=True)
        self._options = options
        self._folder = resolve_model(options.model, options.revision)
        tokenizer = AutoTokenizer.from_pretrained(self._folder)
        self._template: Template = make_template(tokenizer, config.prompt, options.chat_template)
        self._preamble = self._template.preamble()
        vllm_config = _engine_config(options, self._folder)
        self._max_tokens = int(vllm_config.model_config.max_model_len) - 1
        self._config = config
        self._status, self._stop = status, stop
        self.fingerprint: Fingerprint = make_fingerprint(
            vllm_config,
            model_digest(self._folder),
            self._preamble.token_ids,
            config.prompt,
            config.encoding.policy,
            config.encoding.kv_dtype,
        )
        self._exponents: torch.Tensor | None = None
        self._stale = 0
        self._budget = StoreBudget(config.quota.max_store_bytes, self._store.total_bytes)
        self._committer = FactsCommitter(
            self._store,
            self._budget,
            config.encoding.embedder,
            config.retrieval.embedder_api_key_file or None,
        )
        shape = model_figures(vllm_config, self._folder)
        self.report = EncodeReport(self.fingerprint.digest, model=shape)

    def run(self, users: Mapping[str, UserInput], source: str, shard: tuple[int, int]) -> None:
        """Encodes what is new or changed; ``report`` holds what was done.

        Args:
            users: The input; each user's whole memory.
            source: Name of the input, for errors.
            shard: ``(index, count)``.

        Raises:
            InputError: When a fact is longer than the model allows.
            ConfigError: When a quota is passed.
            Terminated: When SIGTERM came; what was read is committed.
        """
        digest = self.fingerprint.digest
        report = self.report
        mine = {user: given for user, given in users.items() if in_shard(user, *shard)}
        report.shard = f"{shard[0]}/{shard[1]}"
        report.users = len(mine)
        report.facts = sum(len(given.facts) for given in mine.values())
        self._status.enter(
            "committing_facts", fingerprint=digest, users=report.users, facts=report.facts
        )
        refuse_many_facts(mine, self._config.quota)
        self._refuse_long_facts(list(mine.values()), source)
        self._forget_expired(shard)
        work: list[tuple[UserMemory, list[EncodePlan]]] = []
        for given in mine.values():
            with self._stop.deferred():
                memory = self._committer.commit(given)
            if plans := self._plan(memory):
                work.append((memory, plans))
        report.removed = self._committer.removed
        self._finish(work, shard)

    def run_pending(self, shard: tuple[int, int]) -> None:
        """Encodes the facts that are in the store and have no KV for this model.

        Args:
            shard: ``(index, count)``.

        Raises:
            ConfigError: When a quota is passed.
            Terminated: When SIGTERM came; what was read is committed.
        """
        digest = self.fingerprint.digest
        report = self.report
        report.shard = f"{shard[0]}/{shard[1]}"
        self._status.enter("committing_facts", fingerprint=digest)
        self._forget_expired(shard)
        work: list[tuple[UserMemory, list[EncodePlan]]] = []
        for stats in self._store.user_stats():
            self._stop.check()
            if not in_shard(stats.user, *shard):
                continue
            report.users += 1
            report.facts += stats.facts
            if stats.pending(digest):
                with self._stop.deferred():
                    memory = self._committer.with_embeddings(stats.user)
                if memory is not None and (plans := self._plan(memory)):
                    work.append((memory, plans))
        self._status.enter("committing_facts", users=report.users, facts=report.facts)
        self._finish(work, shard)

    def _forget_expired(self, shard: tuple[int, int]) -> None:
        days = self._config.retention.max_age_days
        if days is None:
            return
        for stats in self._store.user_stats():
            self._stop.check()
            if in_shard(stats.user, *shard):
                with self._stop.deferred():
                    self.report.expired += self._committer.forget_expired(stats.user, days)

    def _plan(self, memory: UserMemory) -> list[EncodePlan]:
        plans, too_long = plan_encoding(
            memory,
            self._template,
            self._preamble.token_ids,
            self._policy,
            self.fingerprint.digest,
            self._max_tokens,
        )
        self.report.too_long += len(too_long)
        return plans

    def _finish(
        self, work: list[tuple[UserMemory, list[EncodePlan]]], shard: tuple[int, int]
    ) -> None:
        needs_preamble = self._store.read_preamble(self.fingerprint.digest) is None
        if work or needs_preamble:
            self._encode(work, needs_preamble)
        self.report.store_bytes = self._store.total_bytes(*shard)
        self._status.enter("done")

    def _refuse_long_facts(self, users: list[UserInput], source: str) -> None:
        """Looks at all facts before anything is written."""
        room = self._max_tokens - len(self._preamble.token_ids)
        for given in users:
            for fact in given.facts:
                if len(self._template.fact_token_ids(fact.text)) > room:
                    raise InputError(
                        source,
                        0,
                        "text",
                        f"fact '{fact.id}' is longer than the model's {self._max_tokens} tokens",
                        "Split the fact or use a model with a longer context",
                    )

    def _encode(
        self, work: list[tuple[UserMemory, list[EncodePlan]]], needs_preamble: bool
    ) -> None:
        total = sum(len(plans) for _, plans in work)
        self._status.enter("loading", pending=total)
        engine = EncodeEngine(
            self._folder,
            self._options.dtype,
            self._options.max_model_len,
            kv_cache_bytes=self._options.kv_cache_bytes,
        )
        progress = ProgressLines(self._status)
        try:
            self._status.enter("encoding")
            with self._stop.deferred():
                if needs_preamble:
                    self._encode_preamble(engine)
                progress.start(total)
                for memory, plans in work:
                    self._stop.check()
                    self._encode_user(engine, memory, plans, progress)
                    self._encode_changed(engine, memory, progress)
        finally:
            progress.stop()
            self.report.computed_tokens = engine.computed_tokens
            engine.close()
        logger.info("encoded %d facts under %s", self.report.encoded, self.report.fingerprint[:16])

    def _encode_preamble(self, engine: EncodeEngine) -> None:
        ids = self._preamble.token_ids
        found: list[torch.Tensor] = []
        engine.encode(
            [EncodeRequest("preamble", ids, len(ids))], lambda request, kv: found.append(kv)
        )
        fields = {
            **self.fingerprint.model_dump(mode="json"),
            "prompt": self._config.prompt.model_dump(mode="json"),
            "embedder": self._config.encoding.embedder,
        }
        self._store.write_preamble(self.fingerprint.digest, fields, ids, found[0])

    def _stored_form(self, kv: torch.Tensor) -> StoredKV:
        kind = self._config.encoding.kv_dtype
        if kind == "auto":
            return kv
        if self._exponents is None:
            # From the store even if this job wrote it: of several shards one wrote it last.
            found = self._store.read_preamble(self.fingerprint.digest)
            assert found is not None, "the preamble is written before the first fact"
            self._exponents = channel_exponents(found[2])
        return pack(kv, kind, self._exponents)

    def _encode_changed(
        self, engine: EncodeEngine, memory: UserMemory, progress: ProgressLines
    ) -> None:
        """Reads again what the memory API changed or deleted while it was read."""
        for _ in range(_AGAIN):
            if not self._stale:
                return
            self._stale = 0
            now = self._store.read_user(memory.user)
            plans = self._plan(now) if now is not None else []
            if now is not None and plans:
                self._encode_user(engine, now, plans, progress)
        self._stale = 0  # The next run takes what is left.

    def _encode_user(
        self,
        engine: EncodeEngine,
        memory: UserMemory,
        plans: list[EncodePlan],
        progress: ProgressLines,
    ) -> None:
        digest = self.fingerprint.digest
        by_name = {f"fact{n}": plan for n, plan in enumerate(plans)}
        ready: list[NewSegment] = []

        def requests() -> Iterator[EncodeRequest]:
            for name, plan in by_name.items():
                yield EncodeRequest(name, plan.prompt_ids, len(plan.token_ids))

        def commit() -> None:
            if ready:
                self._budget.spend(memory.user, sum(segment.kv.nbytes for segment in ready))
                _, stale = add_segments(self._store, memory, {digest: list(ready)})
                self._stale += stale
                ready.clear()

        def done(request: EncodeRequest, kv: torch.Tensor) -> None:
            plan = by_name[request.name]
            ready.append(
                NewSegment(
                    fact_id=plan.fact.id,
                    key=plan.key,
                    token_ids=plan.token_ids,
                    context_fact_ids=plan.context.fact_ids,
                    context_turn_ids=plan.context.turn_ids,
                    kv=self._stored_form(kv),
                )
            )
            self.report.encoded += 1
            self.report.tokens += len(plan.prompt_ids)
            self._status.add(len(plan.prompt_ids))
            progress.step()
            if len(ready) >= COMMIT_FACTS:
                commit()

        def between() -> None:
            if self._stop.requested:
                commit()
                self._stop.check()

        engine.encode(requests(), done, between=between)
        commit()
