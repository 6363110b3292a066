"""The shape of a model's KV cache, and how vLLM divides it over GPUs (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from inferscale_runtime.errors import BudgetError


class ModelShape(BaseModel):
    """What a budget needs to know of a model."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_layers: int = Field(ge=1)
    """Layers with a KV cache."""
    num_attention_heads: int = Field(ge=1)
    """Query heads in all, over all ranks."""
    num_kv_heads: int = Field(ge=1)
    """KV heads in all, over all ranks."""
    head_dim: int = Field(ge=1)
    """Elements of one head."""
    kv_dtype_bytes: int = Field(2, ge=1, le=8)
    """Bytes of one element of the KV cache."""
    weight_bytes: int = Field(ge=0)
    """Weights of the whole model, over all ranks."""


def kv_heads_per_gpu(num_kv_heads: int, num_attention_heads: int, tensor_parallel_size: int) -> int:
    """KV heads that one rank holds.

    vLLM's rule (0.32, ``config/model.py`` and ``models/llama.py``): the attention heads divide by
    the ranks; KV heads are split when there are enough of them, otherwise each is replicated to
    the same number of ranks.

    Raises:
        BudgetError: When the heads do not divide.
    """
    size = tensor_parallel_size
    if num_attention_heads % size:
        raise BudgetError(
            f"tensorParallelSize {size}: does not divide the model's {num_attention_heads} "
            f"attention heads; use one of {_divisors(num_attention_heads, num_kv_heads)}"
        )
    larger, smaller = max(num_kv_heads, size), min(num_kv_heads, size)
    if larger % smaller:
        raise BudgetError(
            f"tensorParallelSize {size}: {num_kv_heads} KV heads can neither be split over nor "
            f"replicated to it evenly; use one of {_divisors(num_attention_heads, num_kv_heads)}"
        )
    return max(1, num_kv_heads // size)


def _divisors(num_attention_heads: int, num_kv_heads: int) -> str:
    sizes = (
        n
        for n in range(1, min(64, num_attention_heads) + 1)
        if num_attention_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)
    )
    return ", ".join(str(n) for n in sizes)


def kv_bytes_per_token(model: ModelShape, tensor_parallel_size: int = 1) -> int:
    """Bytes of one token's keys and values on one GPU.

    Raises:
        BudgetError: When the heads do not divide.
    """
    heads = kv_heads_per_gpu(model.num_kv_heads, model.num_attention_heads, tensor_parallel_size)
    return 2 * model.num_layers * heads * model.head_dim * model.kv_dtype_bytes


_HF_DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def model_shape(
    config: Mapping[str, Any],
    *,
    weight_bytes: int | None = None,
    num_parameters: int | None = None,
    kv_dtype_bytes: int | None = None,
) -> ModelShape:
    """Reads a Hugging Face ``config.json``.

    Args:
        config: The parsed document; the text part of a multimodal one is used.
        weight_bytes: Size of the weights. One of this and ``num_parameters`` is needed.
        num_parameters: Number of parameters, at the config's dtype.
        kv_dtype_bytes: Bytes of one KV element; the config's dtype when None.

    Raises:
        BudgetError: Naming the missing field.
    """
    text = {**config, **(config.get("text_config") or {})}

    def number(*names: str) -> int:
        for name in names:
            if isinstance(text.get(name), int):
                return int(text[name])
        raise BudgetError(f"config.json: field '{names[0]}' is missing or not a whole number")

    heads = number("num_attention_heads")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    element = _HF_DTYPE_BYTES.get(dtype, 2)
    if weight_bytes is None:
        if num_parameters is None:
            raise BudgetError("the size of the weights is not known; give it in bytes")
        weight_bytes = num_parameters * element
    head_dim = text.get("head_dim") or number("hidden_size") // heads
    return ModelShape(
        num_layers=number("num_hidden_layers"),
        num_attention_heads=heads,
        num_kv_heads=number("num_key_value_heads", "num_attention_heads"),
        head_dim=int(head_dim),
        kv_dtype_bytes=kv_dtype_bytes or element,
        weight_bytes=weight_bytes,
    )
