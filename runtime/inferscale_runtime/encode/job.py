"""The encoding job: input file to store, resumable at any point.

First the facts themselves are committed (with what may no longer be injected taken out), then
segments in batches; whatever was committed before a kill is not encoded again.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from inferscale_runtime.config import RuntimeConfig
from inferscale_runtime.encode.changes import EncodePlan, merge_memory, plan_encoding
from inferscale_runtime.encode.engine import EncodeEngine, EncodeRequest
from inferscale_runtime.encode.input import UserInput
from inferscale_runtime.encode.model import make_fingerprint, make_template, resolve_model
from inferscale_runtime.encode.policies import ContextPolicy, parse_policy
from inferscale_runtime.errors import InputError
from inferscale_runtime.fingerprint import Fingerprint, model_digest
from inferscale_runtime.prompt.template import Template
from inferscale_runtime.retrieval.embedder import Embedder, load_embedder
from inferscale_runtime.store.records import UserMemory
from inferscale_runtime.store.store import NewSegment, Store

logger = logging.getLogger("inferscale.encode")

COMMIT_FACTS = 64
"""Segments a commit; a kill loses at most the work on so many facts (arbitrary)."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """vLLM's side of an encoding job.

    Attributes:
        model: Folder or hub id.
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


@dataclass(slots=True)
class EncodeReport:
    """What a job did.

    Attributes:
        fingerprint: Digest that the segments belong to.
        users: Users of this shard.
        facts: Their facts.
        encoded: Facts read in this run.
        tokens: Tokens read in this run, context included.
        seconds: Time spent reading.
    """

    fingerprint: str
    users: int = 0
    facts: int = 0
    encoded: int = 0
    tokens: int = 0
    seconds: float = 0.0


def in_shard(user: str, shard: int, num_shards: int) -> bool:
    """Whether a user belongs to a shard: by hash, so that all shards agree without talking."""
    return int.from_bytes(hashlib.sha256(user.encode()).digest()[:8], "big") % num_shards == shard


def _engine_config(options: ModelOptions, folder: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        folder, dtype=options.dtype, max_model_len=options.max_model_len, enforce_eager=True
    )
    return arguments.create_engine_config()


class EncodeJob:
    """One run of ``inferscale encode``."""

    def __init__(self, config: RuntimeConfig, options: ModelOptions) -> None:
        from transformers import AutoTokenizer

        self._policy: ContextPolicy = parse_policy(config.encoding.policy)
        self._store = Store.open(config.store, create=True)
        self._options = options
        self._folder = resolve_model(options.model)
        tokenizer = AutoTokenizer.from_pretrained(self._folder)
        self._template: Template = make_template(tokenizer, config.prompt, options.chat_template)
        self._preamble = self._template.preamble()
        vllm_config = _engine_config(options, self._folder)
        self._max_tokens = int(vllm_config.model_config.max_model_len) - 1
        self._config = config
        self.fingerprint: Fingerprint = make_fingerprint(
            vllm_config,
            model_digest(self._folder),
            self._preamble.token_ids,
            config.prompt,
            config.encoding.policy,
        )
        self._embedder: Embedder | None = None

    def run(
        self, users: Mapping[str, UserInput], source: str, shard: tuple[int, int], progress: Any
    ) -> EncodeReport:
        """Encodes what is new or changed.

        Args:
            users: The input; each user's whole memory.
            source: Name of the input, for errors.
            shard: ``(index, count)``.
            progress: ``tqdm``-like class for the progress bar.

        Returns:
            The report.

        Raises:
            InputError: When a fact is longer than the model allows.
        """
        digest = self.fingerprint.digest
        report = EncodeReport(digest)
        mine = [given for user, given in users.items() if in_shard(user, *shard)]
        self._refuse_long_facts(mine, source)
        work: list[tuple[UserMemory, list[EncodePlan]]] = []
        for given in mine:
            memory = self._commit_facts(given)
            plans, _ = plan_encoding(
                memory,
                self._template,
                self._preamble.token_ids,
                self._policy,
                digest,
                self._max_tokens,
            )
            report.users += 1
            report.facts += len(memory.facts)
            if plans:
                work.append((memory, plans))
        needs_preamble = self._store.read_preamble(digest) is None
        if work or needs_preamble:
            self._encode(work, needs_preamble, report, progress)
        return report

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
        if self._embedder is None:
            self._embedder = load_embedder(
                self._config.encoding.embedder,
                api_key_file=self._config.retrieval.embedder_api_key_file or None,
            )
        old = self._store.read_user(given.user)
        memory, todo = merge_memory(given.user, old, given.facts, given.turns, self._embedder.name)
        if todo:
            rows = self._embedder.embed([memory.facts[n].text for n in todo])
            embeddings = memory.embeddings
            if embeddings.shape[1] != rows.shape[1]:
                embeddings = np.zeros((len(memory.facts), rows.shape[1]), np.float32)
            embeddings[todo] = rows
            memory = replace(memory, embeddings=embeddings)
        same = old is not None and (old.facts, old.turns, old.encodings) == (
            memory.facts, memory.turns, memory.encodings
        )  # fmt: skip
        if same and not todo:
            return memory
        return self._store.commit_user(memory, {})

    def _encode(
        self,
        work: list[tuple[UserMemory, list[EncodePlan]]],
        needs_preamble: bool,
        report: EncodeReport,
        progress: Any,
    ) -> None:
        engine = EncodeEngine(
            self._folder,
            self._options.dtype,
            self._options.max_model_len,
            kv_cache_bytes=self._options.kv_cache_bytes,
        )
        digest = self.fingerprint.digest
        started = time.perf_counter()
        try:
            if needs_preamble:
                self._encode_preamble(engine)
            with progress(total=sum(len(plans) for _, plans in work), unit="fact") as bar:
                for memory, plans in work:
                    self._encode_user(engine, memory, plans, report, bar, started)
        finally:
            engine.close()
        report.seconds = time.perf_counter() - started
        logger.info("encoded %d facts under %s", report.encoded, digest[:16])

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

    def _encode_user(
        self,
        engine: EncodeEngine,
        memory: UserMemory,
        plans: list[EncodePlan],
        report: EncodeReport,
        bar: Any,
        started: float,
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
                    kv=kv,
                )
            )
            report.encoded += 1
            report.tokens += len(plan.prompt_ids)
            rate = report.tokens / (time.perf_counter() - started)
            bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            bar.update()
            if len(ready) >= COMMIT_FACTS:
                commit()

        engine.encode(requests(), done)
        commit()
