"""How the memory of a PersonalizedModel's GPUs is divided, and whether its spec fits (pure).

Done only where GPUs are asked for and everything is known: the shape of the model from a store that
was encoded for it, the size of the GPUs from the nodes. Without that nothing is refused and vLLM
takes its own share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.deployment import NO_SHARE, GpuShare
from inferscale_operator.desired.kinds import MEMORY_STORE, Manifest
from inferscale_operator.desired.quantities import asks_for_gpus, has_accelerator
from inferscale_operator.planner.conditions import Draft
from inferscale_operator.planner.plan import Observed
from inferscale_runtime.budget import (
    BudgetError,
    BudgetRequest,
    BudgetRow,
    ModelShape,
    compute_budget,
    parse_quantity,
)

UTILIZATION_FLAG = "--gpu-memory-utilization"
BLOCK_TOKENS = 16
"""vLLM's block on GPUs, unless it is told otherwise."""

_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_WHY_LIMIT = 256


@dataclass(frozen=True, slots=True)
class GpuDecision:
    """What is decided about GPU memory.

    Attributes:
        share: For the server's settings.
        draft: ``Compatible``, when the spec cannot be served.
        status: ``status.budget``, or None.
    """

    share: GpuShare = NO_SHARE
    draft: Draft | None = None
    status: Manifest | None = None


def decide_gpu(
    spec: PersonalizedModelSpec, observed: Observed, recorded: Mapping[str, object]
) -> GpuDecision:
    """Divides the memory of one GPU.

    Args:
        spec: Of the PersonalizedModel.
        observed: What was seen: stores, and the GPUs' memory.
        recorded: The last ``status.budget``: its memory holds while no node tells another, so that
            nodes that come and go replace no server.
    """
    serving = spec.serving
    budget = spec.tiers.gpu.budget
    given = parse_quantity(budget) if budget not in (None, "auto") else 0
    if not asks_for_gpus(serving.resources, serving.tensor_parallel_size):
        if given and not has_accelerator(serving.resources):
            message = (
                f"spec.tiers.gpu.budget '{budget}': spec.serving asks for no GPU; remove it, or "
                "name GPUs in spec.serving.resources.limits"
            )
            return GpuDecision(draft=Draft("Compatible", False, "NoGpu", message, warning=True))
        return GpuDecision(GpuShare(given))
    memory = observed.gpu_memory_bytes or _whole(recorded.get("gpuMemoryBytes"))
    if not memory or engine_flag(serving.engine_args, UTILIZATION_FLAG) is not None:
        return GpuDecision(GpuShare(given))
    shape = model_shape_of(spec, observed)
    if shape is None:
        return GpuDecision(GpuShare(given), status={"gpuMemoryBytes": memory, "rows": []})
    arena: int | Literal["auto"] = "auto" if budget == "auto" else given
    try:
        result = compute_budget(_request(spec, shape, memory, arena))
    except BudgetError as error:
        rows = [row for row in error.rows if isinstance(row, BudgetRow)]
        return GpuDecision(
            draft=Draft("Compatible", False, "BudgetExceeded", str(error), warning=True),
            status=_status(memory, None, rows),
        )
    utilization = result.gpu_memory_utilization
    return GpuDecision(
        GpuShare(result.gpu_arena_bytes, utilization),
        status=_status(memory, utilization, result.rows),
    )


def model_shape_of(spec: PersonalizedModelSpec, observed: Observed) -> ModelShape | None:
    """The model's shape, as the encoder of the first store that knows it has reported it."""
    element = _DTYPE_BYTES.get(engine_flag(spec.serving.engine_args, "--kv-cache-dtype") or "")
    if (engine_flag(spec.serving.engine_args, "--kv-cache-dtype") or "").startswith("fp8"):
        element = 1
    for reference in spec.memory_stores:
        live = observed.references.get((MEMORY_STORE.kind, reference.name), {})
        shape = (live.get("status") or {}).get("modelShape") or {}
        numbers = {
            name: _whole(shape.get(field))
            for name, field in (
                ("num_layers", "numLayers"),
                ("num_attention_heads", "numAttentionHeads"),
                ("num_kv_heads", "numKvHeads"),
                ("head_dim", "headDim"),
                ("weight_bytes", "weightBytes"),
            )
        }
        if all(numbers.values()):
            stored = _DTYPE_BYTES.get(str(shape.get("kvDtype", "")), 2)
            return ModelShape(**numbers, kv_dtype_bytes=element or stored)
    return None


def _request(
    spec: PersonalizedModelSpec, shape: ModelShape, memory: int, arena: int | Literal["auto"]
) -> BudgetRequest:
    arguments = spec.serving.engine_args
    block = _flag_number(arguments, "--block-size") or BLOCK_TOKENS
    return BudgetRequest(
        model=shape,
        gpu_total_bytes=memory,
        tensor_parallel_size=spec.serving.tensor_parallel_size,
        # Without a length only vLLM knows the model's own: then one block has to fit.
        max_model_len=spec.model.max_model_len or block,
        target_seqs=_flag_number(arguments, "--max-num-seqs") or 1,
        block_size=block,
        gpu_arena=arena,
        headroom_fraction=spec.tiers.gpu.headroom_percent / 100,
        dram_tier_bytes=parse_quantity(spec.tiers.dram),
    )


def engine_flag(arguments: Sequence[str], flag: str) -> str | None:
    """Value of a vLLM flag, the last one; ``""`` when it has none, None when it is not named."""
    found = None
    for index, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        if not name.startswith("--") or name.replace("_", "-") != flag:
            continue
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        found = value if has_value else ("" if following.startswith("-") else following)
    return found


def _flag_number(arguments: Sequence[str], flag: str) -> int | None:
    """A positive whole number; what is none is left to vLLM, which names it."""
    text = engine_flag(arguments, flag) or ""
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,8}", text) else None


def _status(memory: int, utilization: float | None, rows: Sequence[BudgetRow]) -> Manifest:
    share = {} if utilization is None else {"gpuMemoryUtilization": utilization}
    return {
        "gpuMemoryBytes": memory,
        **share,
        "rows": [
            {
                "scope": row.scope,
                "term": row.term,
                "bytes": max(0, row.bytes),
                "why": row.why[:_WHY_LIMIT],
            }
            for row in rows
        ],
    }


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
