"""The encoding job: input file to store, resumable at any point.

First the facts themselves are committed (with what may no longer be injected taken out), then
segments in batches; whatever was committed before a kill is not encoded again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from inferscale_runtime.config import RuntimeConfig
from inferscale_runtime.encode.changes import EncodePlan, merge_memory, plan_encoding
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
from inferscale_runtime.retrieval.embedder import Embedder, load_embedder
from inferscale_runtime.store.records import UserMemory
from inferscale_runtime.store.store import NewSegment, Store
from inferscale_runtime.store.tensors import StoredKV

logger = logging.getLogger("inferscale.encode")

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
        expired: Facts of the input that retention left out.
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
        self._embedder: Embedder | None = None
        self._budget = StoreBudget(config.quota.max_store_bytes, self._store.total_bytes)
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
        work: list[tuple[UserMemory, list[EncodePlan]]] = []
        for given in mine.values():
            with self._stop.deferred():
                memory = self._commit_facts(given)
            plans, _ = plan_encoding(
                memory,
                self._template,
                self._preamble.token_ids,
                self._policy,
                digest,
                self._max_tokens,
            )
            if plans:
                work.append((memory, plans))
        needs_preamble = self._store.read_preamble(digest) is None
        if work or needs_preamble:
            self._encode(work, needs_preamble)
        report.store_bytes = self._store.total_bytes(*shard)
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

    def _commit_facts(self, given: UserInput) -> UserMemory:
        old = self._store.read_user(given.user)
        name = self._config.encoding.embedder
        memory, todo = merge_memory(given.user, old, given.facts, given.turns, name, given.origins)
        if old is None and not given.facts and not given.turns:
            return memory  # a user without memory is no user of the store
        if old is not None:
            self.report.removed += len({f.id for f in old.facts} - {f.id for f in memory.facts})
        if todo:
            rows = self._embed([memory.facts[n].text for n in todo])
            embeddings = memory.embeddings
            if embeddings.shape[1] != rows.shape[1]:
                embeddings = np.zeros((len(memory.facts), rows.shape[1]), np.float32)
            embeddings[todo] = rows
            memory = replace(memory, embeddings=embeddings)
        same = old is not None and (old.facts, old.turns, old.encodings, old.tombstones) == (
            memory.facts, memory.turns, memory.encodings, memory.tombstones
        )  # fmt: skip
        if same and not todo:
            return memory
        texts = (*(f.text for f in given.facts), *(t.text for t in given.turns)) if todo else ()
        self._budget.spend(given.user, sum(len(text.encode()) for text in texts))
        return self._store.commit_user(memory, {})

    def _embed(self, texts: list[str]) -> np.ndarray[Any, Any]:
        """Loads the embedder with the first fact that needs it: a run without news needs none."""
        if self._embedder is None:
            self._embedder = load_embedder(
                self._config.encoding.embedder,
                api_key_file=self._config.retrieval.embedder_api_key_file or None,
            )
        return self._embedder.embed(texts)

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
        current = memory

        def requests() -> Iterator[EncodeRequest]:
            for name, plan in by_name.items():
                yield EncodeRequest(name, plan.prompt_ids, len(plan.token_ids))

        def commit() -> None:
            nonlocal current
            if ready:
                self._budget.spend(memory.user, sum(segment.kv.nbytes for segment in ready))
                current = self._store.commit_user(current, {digest: list(ready)})
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
