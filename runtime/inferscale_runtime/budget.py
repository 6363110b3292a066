"""How the memory of one server pod is divided, before anything is started.

Pure: pydantic and the standard library only, because the operator imports it. One calculation gives
vLLM's ``gpu_memory_utilization``, its KV pool, the GPU arena, the size of ``/dev/shm`` and the
pod's memory request, each with a row that says where the number comes from; a spec that cannot fit
is refused with the same rows.

Per GPU::

    total = headroom + weights + engine overhead + KV pool + GPU arena
    gpu_memory_utilization = (weights + engine overhead + KV pool) / total

vLLM allocates up to its share of the *total*; the arena and the headroom stay outside it.

"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from inferscale_runtime.errors import BudgetError, ConfigError
from inferscale_runtime.model_shape import (
    ModelShape,
    kv_bytes_per_token,
    kv_heads_per_gpu,
    model_shape,
)
from inferscale_runtime.quantity import exact_quantity, format_quantity, parse_quantity

__all__ = [
    "Budget",
    "BudgetError",
    "BudgetRequest",
    "BudgetRow",
    "ConfigError",
    "ModelShape",
    "compute_budget",
    "exact_quantity",
    "format_quantity",
    "format_rows",
    "kv_bytes_per_token",
    "kv_heads_per_gpu",
    "model_shape",
    "parse_quantity",
]

GIB = 1 << 30
MIB = 1 << 20

UTILIZATION_STEPS = 10_000
"""``gpu_memory_utilization`` is rounded down to four decimals, so that it prints exactly."""

AUTO_ARENA_SHARE = 4
"""An ``auto`` GPU arena takes at most one part in this of what weights, overhead and headroom leave
(arbitrary: the rest also serves vLLM as prefix cache)."""

TIER_MARGIN_PERCENT = 20
"""Room over the DRAM tier in ``/dev/shm`` (file system overhead, leases, vLLM's queues)."""

MIN_SHM_MARGIN_BYTES = 256 * MIB
"""Least room over the tier: vLLM's broadcast queue alone takes 10 chunks of 16 MiB or more
(vLLM 0.32 ``distributed/device_communicators/shm_broadcast.py``)."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class BudgetRequest(_Frozen):
    """What is wanted of one server pod."""

    model: ModelShape
    gpu_total_bytes: int | None = Field(None, ge=1)
    """Memory of one GPU; None without a GPU."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs of the pod."""
    max_model_len: int = Field(ge=1)
    """Longest prompt with answer, in tokens."""
    target_seqs: int = Field(1, ge=1)
    """Requests of full length that the KV pool must hold at once."""
    block_size: int = Field(16, ge=1)
    """Tokens of one vLLM block; each request rounds up to whole blocks."""
    gpu_arena: int | Literal["auto"] = "auto"
    """GPU arena in bytes per GPU; ``auto`` is what the KV need leaves, at most a quarter."""
    headroom_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the GPU that nobody plans with: CUDA context, fragmentation, other processes."""
    engine_overhead_bytes: int = Field(2 * GIB, ge=0)
    """vLLM's activations and CUDA graphs per GPU (arbitrary; vLLM logs the real figure)."""
    dram_tier_bytes: int = Field(GIB, ge=0)
    """DRAM arena of the pod."""
    host_base_bytes: int = Field(2 * GIB, ge=0)
    """Memory of the API process with its embedder."""
    host_worker_bytes: int = Field(2 * GIB, ge=0)
    """Memory of the engine's processes per GPU, beside tier and weights."""


class BudgetRow(_Frozen):
    """One term of the calculation."""

    scope: Literal["gpu", "pod"]
    """``gpu``: per GPU; ``pod``: memory of the node."""
    term: str
    bytes: int
    why: str
    """The formula with its numbers."""


class Budget(_Frozen):
    """The result."""

    gpu_memory_utilization: float | None
    """vLLM's flag; None without a GPU."""
    kv_pool_bytes: int
    """KV cache per GPU; without a GPU the value of ``--kv-cache-memory-bytes``."""
    kv_pool_tokens: int
    """Tokens that the pool holds."""
    gpu_arena_bytes: int
    """GPU arena per GPU."""
    dram_tier_bytes: int
    shm_bytes: int
    """``sizeLimit`` of the volume at ``/dev/shm``."""
    pod_memory_bytes: int
    """Memory request and limit of the server's container."""
    rows: tuple[BudgetRow, ...]


def compute_budget(request: BudgetRequest) -> Budget:
    """Divides the memory of one pod.

    Args:
        request: The model, the GPU and what is wanted.

    Returns:
        The figures and one row for each term.

    Raises:
        BudgetError: When it cannot fit; names the terms, their numbers and what to change.
    """
    row_bytes = kv_bytes_per_token(request.model, request.tensor_parallel_size)
    if request.gpu_total_bytes is None:
        return _cpu_budget(request, row_bytes)
    return _gpu_budget(request, request.gpu_total_bytes, row_bytes)


def _kv_need(request: BudgetRequest, row_bytes: int) -> BudgetRow:
    tokens = math.ceil(request.max_model_len / request.block_size) * request.block_size
    return BudgetRow(
        scope="pod" if request.gpu_total_bytes is None else "gpu",
        term="KV need",
        bytes=request.target_seqs * tokens * row_bytes,
        why=f"{request.target_seqs} requests x {tokens} tokens x {row_bytes} B a token",
    )


def _gpu_budget(request: BudgetRequest, total: int, row_bytes: int) -> Budget:
    size = request.tensor_parallel_size
    weights = -(-request.model.weight_bytes // size)
    headroom = math.ceil(total * Fraction(str(request.headroom_fraction)))
    need = _kv_need(request, row_bytes)
    fixed = (
        BudgetRow(scope="gpu", term="GPU total", bytes=total, why="memory of one GPU"),
        BudgetRow(
            scope="gpu",
            term="headroom",
            bytes=headroom,
            why=f"{request.headroom_fraction:g} of the total, planned by nobody",
        ),
        BudgetRow(
            scope="gpu",
            term="weights",
            bytes=weights,
            why=f"{request.model.weight_bytes} B / {size} GPUs",
        ),
        BudgetRow(
            scope="gpu",
            term="engine overhead",
            bytes=request.engine_overhead_bytes,
            why="activations and CUDA graphs",
        ),
        need,
    )
    free = total - headroom - weights - request.engine_overhead_bytes
    if request.gpu_arena == "auto":
        needed = weights + request.engine_overhead_bytes + need.bytes
        steps = -(-needed * UTILIZATION_STEPS // total)  # rounded up: the pool is never short
        left = total - headroom - -(-steps * total // UTILIZATION_STEPS)
        arena = max(0, min(left, free // AUTO_ARENA_SHARE))
        arena_why = f"auto: what the KV need leaves, at most 1/{AUTO_ARENA_SHARE} of {free} B"
    else:
        arena, arena_why = request.gpu_arena, "as given"
    arena_row = BudgetRow(scope="gpu", term="GPU arena", bytes=arena, why=arena_why)
    steps = (total - headroom - arena) * UTILIZATION_STEPS // total
    pool = steps * total // UTILIZATION_STEPS - weights - request.engine_overhead_bytes
    if arena < 0 or pool < need.bytes:
        raise _does_not_fit(request, (*fixed, arena_row), pool, row_bytes)
    utilization = steps / UTILIZATION_STEPS
    rows = (
        *fixed,
        arena_row,
        BudgetRow(
            scope="gpu",
            term="KV pool",
            bytes=pool,
            why=f"{utilization:.4f} of the total - weights - overhead",
        ),
    )
    return _with_pod(request, rows, utilization, pool, arena, row_bytes, on_host=())


def _cpu_budget(request: BudgetRequest, row_bytes: int) -> Budget:
    if request.gpu_arena not in ("auto", 0):
        raise BudgetError(
            f"tiers.gpu.budget {format_quantity(int(request.gpu_arena))}: there is no GPU; "
            "set it to auto or 0, or ask for a GPU"
        )
    # On CPU the ranks share the pod's memory.
    need = _kv_need(request, row_bytes * request.tensor_parallel_size)
    weights = BudgetRow(
        scope="pod", term="weights", bytes=request.model.weight_bytes, why="held in host memory"
    )
    pool = need.bytes // request.tensor_parallel_size
    return _with_pod(request, (), None, pool, 0, row_bytes, on_host=(weights, need))


def _with_pod(
    request: BudgetRequest,
    rows: tuple[BudgetRow, ...],
    utilization: float | None,
    pool: int,
    arena: int,
    row_bytes: int,
    *,
    on_host: tuple[BudgetRow, ...],
) -> Budget:
    tier = request.dram_tier_bytes
    margin = max(-(-tier * TIER_MARGIN_PERCENT // 100), MIN_SHM_MARGIN_BYTES)
    host = request.host_base_bytes + request.tensor_parallel_size * request.host_worker_bytes
    pod = (
        *on_host,
        BudgetRow(scope="pod", term="DRAM tier", bytes=tier, why="as given"),
        BudgetRow(
            scope="pod",
            term="/dev/shm margin",
            bytes=margin,
            why=f"{TIER_MARGIN_PERCENT} % of the tier, at least {format_quantity(margin)}"
            if margin == MIN_SHM_MARGIN_BYTES
            else f"{TIER_MARGIN_PERCENT} % of the tier",
        ),
        BudgetRow(
            scope="pod",
            term="processes",
            bytes=host,
            why=f"{request.host_base_bytes} B + {request.tensor_parallel_size} x "
            f"{request.host_worker_bytes} B",
        ),
    )
    memory = sum(row.bytes for row in pod)
    total = BudgetRow(
        scope="pod", term="pod memory", bytes=memory, why="sum; /dev/shm counts as memory"
    )
    return Budget(
        gpu_memory_utilization=utilization,
        kv_pool_bytes=pool,
        kv_pool_tokens=pool // (row_bytes * request.block_size) * request.block_size,
        gpu_arena_bytes=arena,
        dram_tier_bytes=tier,
        shm_bytes=tier + margin,
        pod_memory_bytes=memory,
        rows=(*rows, *pod, total),
    )


def _does_not_fit(
    request: BudgetRequest, rows: Sequence[BudgetRow], room: int, row_bytes: int
) -> BudgetError:
    total, parts = rows[0].bytes, rows[1:]
    need = next(row.bytes for row in rows if row.term == "KV need")
    terms = " + ".join(f"{row.term} {_short(row.bytes)}" for row in parts)
    block = request.block_size * row_bytes
    blocks = math.ceil(request.max_model_len / request.block_size)
    mends = []
    if room >= blocks * block:
        mends.append(f"lower the target of full-length requests to {room // (blocks * block)}")
    if room >= block * request.target_seqs:
        length = room // (block * request.target_seqs) * request.block_size
        mends.append(f"lower maxModelLen to {length}")
    if request.gpu_arena not in ("auto", 0):
        mends.append("lower tiers.gpu.budget")
    mends.append("raise tensorParallelSize or use a larger GPU")
    return BudgetError(
        f"GPU memory {_short(total)}: {terms} leave too little: the KV need is "
        f"{_short(need - room)} too large; {', or '.join(mends)}",
        rows,
    )


def _short(value: int) -> str:
    return f"{value / GIB:.2f}Gi" if abs(value) >= GIB // 10 else f"{value / MIB:.1f}Mi"


def format_rows(rows: Sequence[BudgetRow]) -> str:
    """The table that ``inferscale serve --explain-budget`` prints."""
    header = ("scope", "term", "bytes", "", "why")
    lines = [header] + [
        (row.scope, row.term, str(row.bytes), _short(row.bytes), row.why) for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        f"{scope:<{widths[0]}}  {term:<{widths[1]}}  {size:>{widths[2]}}  {short:>{widths[3]}}  "
        f"{why}".rstrip()
        for scope, term, size, short, why in lines
    )
