"""Harness: encodes random facts, puts them in an arena and runs real vLLM engines over them.

One engine lives at a time; ``only_engine`` undoes vLLM's process-wide state, so that one pytest
process can start many.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tests.integration.checkpoints import VOCAB

from inferscale_runtime.config import EncodingConfig, RuntimeConfig, TierConfig
from inferscale_runtime.connector.capability import PARAMS_KEY, Claim, seal_claim
from inferscale_runtime.encode.engine import EncodeEngine, EncodeRequest
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.form import SlabForm
from inferscale_runtime.tiers.leases import Lease
from inferscale_runtime.tiers.slab import (
    SlabShape,
    create_run_files,
    load_secret,
    map_leases,
    map_slab,
    map_stamps,
)

BLOCK = 32
MAX_LEN = 1024
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "block_size": BLOCK,
    # A small cache; the encoder's pool of rows is as large.
    "num_gpu_blocks_override": 256,
    "gpu_memory_utilization": 0.2,
}
_SERVING = {"enable_prefix_caching": True, "distributed_executor_backend": "uni"}
_SALTS = count()


def new_salt() -> str:
    """A cache salt that no other request has."""
    return f"salt{next(_SALTS)}"


def random_ids(rng: random.Random, length: int) -> tuple[int, ...]:
    """Token ids without the special ones."""
    return tuple(rng.randrange(10, VOCAB) for _ in range(length))


@dataclass(frozen=True)
class Memory:
    """A prompt of preamble and facts with the KV of each piece.

    Attributes:
        pieces: Preamble, then the facts.
        kv: ``[tokens, layers, 2, heads, head_dim]`` of each piece.
    """

    pieces: tuple[tuple[int, ...], ...]
    kv: tuple[torch.Tensor, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces for token in piece)


_OPEN: list[Path] = []


@contextmanager
def only_engine(model: Path) -> Iterator[None]:
    """Guards one engine's life, failed starts included.

    vLLM keeps one worker connector per process: a second engine would silently load through the
    first one's, from the first one's slab.
    """
    assert not _OPEN, f"an engine of {_OPEN[0]} is still open"
    _OPEN.append(model)
    try:
        yield
    finally:
        _OPEN.clear()
        _clean_process()


def _clean_process() -> None:
    """Undoes what vLLM keeps per process."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.layers import rotary_embedding

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
    # Memoised rotary modules carry the capture hooks, and would pass for the next model's own.
    rotary_embedding._ROPE_DICT.clear()
    gc.collect()


@contextmanager
def encoder(model: Path) -> Iterator[EncodeEngine]:
    """The encoder's engine."""
    with only_engine(model):
        engine = EncodeEngine(str(model), "float32", MAX_LEN, **OPTIONS)
        try:
            yield engine
        finally:
            engine.close()


def encode(engine: EncodeEngine, pieces: Sequence[tuple[int, ...]]) -> Memory:
    """Reads each piece after everything that stands before it."""
    found: dict[str, torch.Tensor] = {}
    requests, before = [], ()
    for index, piece in enumerate(pieces):
        before = (*before, *piece)
        requests.append(EncodeRequest(f"piece{index}", before, len(piece)))
    engine.encode(requests, lambda request, kv: found.update({request.name: kv}))
    return Memory(tuple(pieces), tuple(found[request.name] for request in requests))


def random_pieces(seed: int, facts: int = 12, preamble: int = 21) -> list[tuple[int, ...]]:
    """Preamble and facts of 7 to 31 tokens, so that hardly any ends at a block's end."""
    rng = random.Random(seed)
    sizes = [preamble, *(rng.randint(7, 31) for _ in range(facts))]
    return [random_ids(rng, size) for size in sizes]


def shared_preamble(model: Path, users: int) -> list[Memory]:
    """Encodes memories of several users, with one preamble."""
    preamble = random_pieces(0)[0]
    with encoder(model) as engine:
        return [encode(engine, [preamble, *random_pieces(user + 1)[1:]]) for user in range(users)]


@dataclass
class Result:
    """What one request gave.

    Attributes:
        tokens: Output ids.
        logprobs: Of the best tokens at the first position.
        cached: vLLM's ``num_cached_tokens``.
    """

    tokens: list[int]
    logprobs: dict[int, float]
    cached: int


@dataclass
class Served:
    """A running engine with the connector and the arena that its claims name."""

    llm: Any
    arena: Arena
    leases: Any
    secret: bytes
    queries: list[tuple[str, Any]] = field(default_factory=list)
    loads: list[Any] = field(default_factory=list)

    def put(self, prefix: str, memory: Memory) -> list[str]:
        """Puts a memory in the arena; the preamble (its first piece) is pinned."""
        keys = [f"{prefix}{index}" for index in range(len(memory.pieces))]
        for key, kv in zip(keys, memory.kv, strict=True):
            assert self.arena.put(key, kv, pin=key == keys[0])
        return keys

    def lease(self, keys: Sequence[str]) -> Lease:
        lease = self.arena.acquire(keys)
        assert lease is not None
        return lease

    def seal(self, lease: Lease, ids: Sequence[int], salt: str) -> dict[str, Any]:
        rows = sum(rows for _, rows in lease.runs)
        claim = Claim(rows, lease.runs, lease.slot, lease.generation)
        return seal_claim(self.secret, claim, salt, ids)

    def request(
        self, ids: Sequence[int], salt: str | None, sealed: Any = None, *, max_tokens: int = 16
    ) -> tuple[dict[str, Any], Any]:
        """Prompt and parameters of a request."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {PARAMS_KEY: sealed}} if sealed is not None else None
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=10, ignore_eos=True, extra_args=extra
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(ids)}
        if salt is not None:
            prompt["cache_salt"] = salt
        return prompt, params

    def run(self, requests: Sequence[tuple[dict[str, Any], Any]]) -> list[Result]:
        """Runs requests together."""
        outputs = self.llm.generate(
            [prompt for prompt, _ in requests],
            [params for _, params in requests],
            use_tqdm=False,
        )
        results = []
        for output in outputs:
            first = output.outputs[0].logprobs[0]
            values = {token: entry.logprob for token, entry in first.items()}
            cached = output.num_cached_tokens or 0
            results.append(Result(list(output.outputs[0].token_ids), values, cached))
        return results

    def text(self, ids: Sequence[int], *, max_tokens: int = 16) -> Result:
        """The same prompt without a claim, under a salt of its own."""
        return self.run([self.request(ids, new_salt(), max_tokens=max_tokens)])[0]

    def inject(
        self,
        keys: Sequence[str],
        ids: Sequence[int],
        *,
        salt: str | None = None,
        max_tokens: int = 16,
    ) -> Result:
        """Runs one claimed request and asserts that the claim was used."""
        salt = salt or new_salt()
        lease = self.lease(keys)
        before = len(self.loads)
        request = self.request(ids, salt, self.seal(lease, ids, salt), max_tokens=max_tokens)
        result = self.run([request])[0]
        self.arena.end(lease, submitted=True)
        assert len(self.loads) > before or result.cached, "the claim was not used"
        return result


@contextmanager
def serve(
    model: Path,
    run_dir: Path,
    *,
    max_step_bytes: int = 1 << 30,
    gpu_bytes: int = 0,
    plan_file: str = "",
    kv_dtype: str = "auto",
    rows: int = 4096,
    **options: Any,
) -> Iterator[Served]:
    """Starts an engine with the connector; the arena is made afterwards, as the server does."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    tiers = TierConfig(max_step_bytes=max_step_bytes, gpu_bytes=gpu_bytes, plan_file=plan_file)
    encoding = EncodingConfig(kv_dtype=kv_dtype)
    config = RuntimeConfig(run_dir=str(run_dir), tiers=tiers, encoding=encoding)
    with only_engine(model):
        llm = LLM(
            str(model),
            dtype="float32",
            enforce_eager=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="InferScaleConnector",
                kv_connector_module_path="inferscale_runtime.connector.facade",
                kv_role="kv_consumer",
                kv_connector_extra_config={"inferscale": config.model_dump(mode="json")},
            ),
            **(OPTIONS | _SERVING | {"max_model_len": MAX_LEN} | options),
        )
        core = llm.llm_engine.engine_core
        try:
            model_config = llm.llm_engine.vllm_config.model_config
            parallel = llm.llm_engine.vllm_config.parallel_config
            shape = SlabShape(
                rows,
                model_config.get_num_layers(parallel),
                model_config.get_total_num_kv_heads(),
                model_config.get_head_size(),
                "float32",
                kv_dtype,
            )
            create_run_files(run_dir, shape)
            leases = map_leases(run_dir)
            arena = Arena(
                map_slab(run_dir, shape),
                leases,
                stamps=map_stamps(run_dir, shape),
                form=SlabForm(shape, run_dir),
            )
            served = Served(llm, arena, leases, load_secret(run_dir))
            _spy(core, served)
            yield served
        finally:
            core.shutdown()


def _spy(core: Any, served: Served) -> None:
    """Notes what the scheduler side was asked and what it handed over."""
    side = core.engine_core.scheduler.connector._scheduler
    ask, hand_over = side.get_num_new_matched_tokens, side.build_connector_meta

    def asked(request: Any, num_computed_tokens: int) -> Any:
        answer = ask(request, num_computed_tokens)
        served.queries.append((request.request_id, answer[0]))
        return answer

    def handed_over() -> Any:
        metadata = hand_over()
        served.loads.extend(metadata.loads)
        return metadata

    side.get_num_new_matched_tokens = asked
    side.build_connector_meta = handed_over


def assert_same(result: Result, expected: Result) -> None:
    """Token for token, and the first logits within float32 noise."""
    assert result.tokens == expected.tokens, (
        f"{result.tokens} is not {expected.tokens}; "
        f"first logprobs differ by {max_difference(result, expected)}"
    )
    assert max_difference(result, expected) < 1e-3


def max_difference(result: Result, expected: Result) -> float:
    """Largest difference of the first token's logprobs, over the tokens both list."""
    common = result.logprobs.keys() & expected.logprobs.keys()
    if len(common) < 5:
        return float("inf")
    return max(abs(result.logprobs[token] - expected.logprobs[token]) for token in common)
