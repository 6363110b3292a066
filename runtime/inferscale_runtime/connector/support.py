"""What can be injected, checked at start and refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inferscale_runtime.errors import UnsupportedModelError

ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Architectures with an exactness test."""

ROTARY = frozenset({"RotaryEmbedding", "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding"})
"""Rotary modules whose rotation depends on the position alone.

YaRN, dynamic NTK and LongRoPE scale by length."""


@dataclass(frozen=True, slots=True)
class TensorRank:
    """One of the workers that share a model's heads.

    Attributes:
        index: From 0.
        size: How many there are.
    """

    index: int
    size: int


def tensor_rank() -> TensorRank:
    """The rank of this worker process."""
    from vllm.distributed import parallel_state

    return TensorRank(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def head_range(num_kv_heads: int, rank: TensorRank) -> slice:
    """KV heads of one rank, split or replicated as in vLLM 0.32 (``models/llama.py``).

    Raises:
        UnsupportedModelError: When they cannot be shared evenly.
    """
    if max(num_kv_heads, rank.size) % min(num_kv_heads, rank.size):
        raise UnsupportedModelError(
            f"--tensor-parallel-size {rank.size}: {num_kv_heads} KV heads cannot be shared evenly; "
            "choose a divisor or a multiple of their number"
        )
    if num_kv_heads >= rank.size:
        share = num_kv_heads // rank.size
        return slice(rank.index * share, (rank.index + 1) * share)
    head = rank.index // (rank.size // num_kv_heads)
    return slice(head, head + 1)


def check_model(vllm_config: Any) -> None:
    """Refuses models and settings whose KV cannot be injected.

    Raises:
        UnsupportedModelError: Naming the property, its value and the mend.
    """
    model = vllm_config.model_config
    found = list(model.hf_config.architectures or [])
    if not ARCHITECTURES.intersection(found):
        raise UnsupportedModelError(
            f"model architecture {found}: supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    if model.use_mla:
        raise UnsupportedModelError("attention 'MLA': its cache holds no keys per head")
    if vllm_config.lora_config is not None:
        raise UnsupportedModelError(
            "--enable-lora: KV of adapters is not stored; serve without LoRA"
        )
    if vllm_config.speculative_config is not None:
        raise UnsupportedModelError(
            "speculative decoding: the draft model's KV is not stored; serve without it"
        )
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedModelError("--pipeline-parallel-size > 1: use tensor parallelism")
    head_range(model.get_total_num_kv_heads(), TensorRank(0, parallel.tensor_parallel_size))


def attention_layers(vllm_config: Any) -> list[tuple[str, Any]]:
    """Attention layers with a KV cache of their own, in model order.

    Raises:
        UnsupportedModelError: For layers without a portable cache writer.
    """
    from vllm.model_executor.layers.attention.attention import Attention

    context = vllm_config.compilation_config.static_forward_context
    layers = []
    for name, module in context.items():
        if not isinstance(module, Attention):
            raise UnsupportedModelError(
                f"layer {name} ({type(module).__name__}): only full and sliding-window attention "
                "layers can be injected"
            )
        if not hasattr(module.impl, "do_kv_cache_update"):
            raise UnsupportedModelError(
                f"attention backend {type(module.impl).__name__}: it has no do_kv_cache_update; "
                "choose another with --attention-backend"
            )
        layers.append((name, module))
    return sorted(layers, key=lambda item: _layer_number(item[0]))


def _layer_number(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def rotary_module(vllm_config: Any) -> Any:
    """The rotary module that the model uses.

    ``get_rope`` memoises by its arguments, so the call with the model's own arguments returns the
    model's own module; if it had to make a new one, the arguments were not the model's and nothing
    is injected.

    Raises:
        UnsupportedModelError: For a rope that cannot be shifted.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding as rope

    model = vllm_config.model_config
    config = model.hf_text_config
    before = len(rope._ROPE_DICT)
    with set_current_vllm_config(vllm_config):
        module = rope.get_rope(
            model.get_head_size(),
            max_position=config.max_position_embeddings,
            rope_parameters=getattr(config, "rope_parameters", None),
            dtype=model.dtype,
        )
    if len(rope._ROPE_DICT) != before:
        raise UnsupportedModelError(
            "rope: the model's rotary module could not be found by its configuration"
        )
    if type(module).__name__ not in ROTARY:
        raise UnsupportedModelError(
            f"rope type {type(module).__name__}: supported are {', '.join(sorted(ROTARY))}"
        )
    return module
