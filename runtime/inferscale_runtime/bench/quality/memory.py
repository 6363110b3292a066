"""The server's own planning over the stores that are compared: retrieval, staging, lease, claim."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from inferscale_runtime.bench.quality.engine import ScoringEngine
from inferscale_runtime.bench.quality.settings import Setting
from inferscale_runtime.bench.report import BenchError
from inferscale_runtime.config import EncodingConfig, RuntimeConfig, StoreEntry, TierConfig
from inferscale_runtime.packing.shape import KVDtype
from inferscale_runtime.prompt.template import Message
from inferscale_runtime.retrieval.search import top_k
from inferscale_runtime.server.options import MemoryOptions
from inferscale_runtime.server.plugin import build_service
from inferscale_runtime.server.service import MemoryService, Prepared
from inferscale_runtime.server.stores import OpenStore

_TEMPLATE_ARGUMENTS = {"add_generation_prompt": True}
_STAGE_TIMEOUT_MS = 600_000
"""Nothing may go as text because the disk is slow."""


def store_name(policy: str) -> str:
    """Name of the store that was encoded with a policy."""
    return policy.replace(":", "-")


def store_folder(workdir: Path, policy: str, kv_dtype: KVDtype) -> Path:
    """Where the store of a policy is kept, with what its encoding cost."""
    suffix = "" if kv_dtype == "auto" else f"-{kv_dtype}"
    return workdir / f"{store_name(policy)}{suffix}"


def runtime_config(
    policies: Sequence[str], kv_dtype: KVDtype, folder: Path, run_dir: Path, dram_bytes: int
) -> RuntimeConfig:
    """Settings of a server that has a store for each policy."""
    entries = tuple(
        StoreEntry(
            name=store_name(policy), url=str(store_folder(folder, policy, kv_dtype) / "store")
        )
        for policy in policies
    )
    tiers = TierConfig(dram_bytes=dram_bytes, stage_timeout_ms=_STAGE_TIMEOUT_MS)
    encoding = EncodingConfig(kv_dtype=kv_dtype)
    return RuntimeConfig(stores=entries, encoding=encoding, run_dir=str(run_dir), tiers=tiers)


@dataclass(frozen=True, slots=True)
class Ask:
    """A question with what it is asked with.

    Attributes:
        user: Whose memory.
        question: The question.
        k: Facts to retrieve.
    """

    user: str
    question: str
    k: int

    @property
    def messages(self) -> list[Message]:
        """The conversation."""
        return [{"role": "user", "content": self.question}]


class Memory:
    """Plans prompts as the server does.

    Args:
        service: With one store for each policy.
    """

    def __init__(self, service: MemoryService) -> None:
        self._service = service
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Ends the loop."""
        self._runner.close()

    def fingerprint(self, policy: str) -> str:
        """Digest of the encoding that is used."""
        return self._store(policy).identity.fingerprint

    def _store(self, policy: str) -> OpenStore:
        served = self._service.stores[store_name(policy)]
        if served.current is None or served.reason is not None:
            raise BenchError(f"the store of policy '{policy}' cannot be used: {served.reason}")
        return served.current

    @contextmanager
    def prompt(
        self, ask: Ask, setting: Setting, mode: str, *, submitted: bool = True
    ) -> Iterator[Prepared]:
        """A planned request, whose facts stay in the arena while the block runs.

        Args:
            ask: What is asked.
            setting: How.
            mode: ``injected`` or ``text``.
            submitted: False when the engine will never see it; its facts are let go at once then.
        """
        options = MemoryOptions.model_validate(
            {
                "user": ask.user,
                "store": store_name(setting.policy),
                "k": ask.k,
                "mode": mode,
                "link_tail": setting.link_tail,
                "order": setting.order,
            }
        )
        prepared = self._runner.run(
            self._service.prepare(options, ask.messages, dict(_TEMPLATE_ARGUMENTS), None)
        )
        try:
            wanted = ("text",) if mode == "text" else ("injected", "text")
            usage = prepared.usage
            if usage.mode not in wanted or usage.reason not in (None, "link_tail"):
                raise BenchError(f"{setting.name}: the request would go as {usage.as_dict()}")
            yield prepared
        finally:
            self._service.end(prepared, submitted=submitted)

    def prompt_without_facts(self, ask: Ask, policy: str) -> list[int]:
        """The same prompt with an empty memory."""
        identity = self._store(policy).identity
        halves = identity.template.split(
            ask.messages, identity.preamble.role, dict(_TEMPLATE_ARGUMENTS)
        )
        assert halves is not None, "the template gave a preamble, so it keeps the place"
        return [token for half in halves for token in identity.template.tokenize(half)]

    def answer_ids(self, answer: str, policy: str, end: int | None) -> list[int]:
        """Tokens of an answer, with the token that ends it."""
        ids = self._store(policy).identity.template.tokenize(answer)
        return ids if end is None else [*ids, end]

    def retrieved(self, ask: Ask, policy: str) -> list[str]:
        """Ids of the facts that the question gets, best first."""
        opened = self._store(policy)
        view = opened.users.get(ask.user, opened.identity.fingerprint)
        if view is None or opened.questions is None:
            raise BenchError(f"the store of policy '{policy}' lacks {ask.user} or its embedder")
        query = self._runner.run(opened.questions.embed(ask.question))
        best = top_k(query, view.memory.embeddings, ask.k)
        return [view.memory.facts[n].id for n in best]


@contextmanager
def open_memory(config: RuntimeConfig, engine: ScoringEngine) -> Iterator[Memory]:
    """Opens the stores beside a running engine."""
    # The server leaves half of the cores to the engine's process; here both are one process.
    threads = torch.get_num_threads()
    service = build_service(config, engine.vllm_config, engine.tokenizer, None)
    torch.set_num_threads(threads)
    memory = Memory(service)
    try:
        yield memory
    finally:
        memory.close()
