"""Scheduler side of the connector: counts tokens, holds no tensors (EngineCore process).

Invariants: ``get_num_new_matched_tokens`` has no side effects that change its answer; the answer is
the same after a preemption; at most ``num_prompt_tokens - 1`` tokens are claimed; only prompt
tokens are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.logger import init_logger

from inferscale_runtime.connector.capability import PARAMS_KEY, Claim, open_claim
from inferscale_runtime.tiers.leases import activate_lease, finish_lease
from inferscale_runtime.tiers.slab import load_secret, load_shape, map_leases
from inferscale_runtime.tracing import TraceHeaders, picked_headers

logger = init_logger("vllm.inferscale.scheduler")


@dataclass(frozen=True, slots=True)
class Load:
    """One request's injection in this step.

    Attributes:
        runs: ``(first row, rows)`` in the slab, in prompt order.
        first: First prompt position to write (what stands before is in the local prefix cache).
        last: One past the last position to write.
        block_ids: The request's blocks, one tuple per KV cache group.
        trace: The request's trace; empty for none.
    """

    runs: tuple[tuple[int, int], ...]
    first: int
    last: int
    block_ids: tuple[tuple[int, ...], ...]
    trace: TraceHeaders = ()


@dataclass
class InjectionMetadata(KVConnectorMetadata):
    """What crosses to the workers each step: rows and slots, never tensors."""

    loads: list[Load] = field(default_factory=list)


class SchedulerSide:
    """Answers how many tokens of a request are injected."""

    def __init__(self, run_dir: Path, max_step_bytes: int) -> None:
        self._run_dir = run_dir
        self._max_step_bytes = max_step_bytes
        self._row_bytes = 0
        self._secret = b""
        self._leases: Any = None
        self._claims: dict[str, Claim | None] = {}
        self._step_bytes = 0
        self._loads: list[Load] = []

    def _ready(self) -> bool:
        if self._leases is None:
            # The API process makes the files after the engine has started.
            shape = load_shape(self._run_dir)
            if shape is None:
                return False
            self._secret = load_secret(self._run_dir)
            self._leases = map_leases(self._run_dir)
            self._row_bytes = shape.row_bytes
        return True

    def _claim(self, request: Any) -> Claim | None:
        if request.request_id in self._claims:
            return self._claims[request.request_id]
        value = (request.kv_transfer_params or {}).get(PARAMS_KEY)
        if value is None:
            return None
        claim = None
        if self._ready():
            prompt = request.prompt_token_ids or []
            claim = open_claim(self._secret, value, request.cache_salt, prompt)
            if claim is None:
                logger.warning("refused a memory claim that this server did not make")
            elif not activate_lease(self._leases, claim.slot, claim.generation):
                claim = None
        self._claims[request.request_id] = claim
        return claim

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to inject beyond the local prefix cache hit; None = ask again next step."""
        claim = self._claim(request)
        if claim is None:
            return 0, False
        num = min(claim.num_tokens, request.num_prompt_tokens - 1) - num_computed_tokens
        if num <= 0:
            return 0, False
        if self._step_bytes and self._step_bytes + num * self._row_bytes > self._max_step_bytes:
            return None, False
        return num, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """Remembers where the claimed tokens of a request that was just admitted go."""
        claim = self._claim(request)
        if claim is None or num_external == 0:
            return
        last = min(claim.num_tokens, request.num_prompt_tokens - 1)
        block_ids = tuple(tuple(ids) for ids in blocks.get_block_ids())
        trace = picked_headers(request.trace_headers)
        self._loads.append(Load(claim.runs, last - num_external, last, block_ids, trace))
        self._step_bytes += num_external * self._row_bytes

    def build_connector_meta(self) -> InjectionMetadata:
        """Hands this step's loads over and opens the next step."""
        metadata = InjectionMetadata(self._loads)
        self._loads, self._step_bytes = [], 0
        return metadata

    def request_finished(self, request: Any) -> None:
        """Ends the lease: finished, aborted or refused, never while preempted."""
        value = (request.kv_transfer_params or {}).get(PARAMS_KEY)
        claim = self._claims.pop(request.request_id, None)
        if claim is None and value is not None and self._ready():
            # Aborted before it was ever scheduled.
            prompt = request.prompt_token_ids or []
            claim = open_claim(self._secret, value, request.cache_salt, prompt)
        if claim is not None:
            finish_lease(self._leases, claim.slot, claim.generation)
