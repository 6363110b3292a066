"""Capture of keys before rope and of raw values on the serving engine itself.

A connector that saves instead of loading: hooks on each layer keep K (after bias and QK-norm,
before the rotary embedding) and V in a shadow pool with one row per cache slot. A row lives exactly
as long as the cache block it belongs to, so prefix caching and chunked prefill need no special
care. When a request finishes, before its blocks are freed, its rows are gathered by its block
table.

The encoder runs vLLM in one process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``, executor ``uni``) and
eagerly, so that hooks run and both roles share one ``CaptureSink``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.forward_context import get_forward_context, is_forward_context_available

from inferscale_runtime.connector.support import attention_layers, check_model, rotary_module
from inferscale_runtime.connector.worker import slot_mapping
from inferscale_runtime.errors import UnsupportedModelError

CAPTURE_CONNECTOR_NAME = "CaptureConnector"


@dataclass
class CaptureSink:
    """Where both roles of the encoder's engine meet.

    Attributes:
        wanted: Request id -> how many rows at the end of its prompt are kept.
        captured: Request id -> ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]`` on the CPU.
        pool: ``[num_slots, num_layers, 2, num_kv_heads, head_dim]`` on the engine's device.
        block_size: Tokens in a block.
        computed_tokens: Tokens that went through the model; the others came from the prefix cache.
    """

    wanted: Callable[[str], int] = field(default=lambda request_id: 0)
    captured: dict[str, torch.Tensor] = field(default_factory=dict)
    pool: torch.Tensor | None = None
    block_size: int = 0
    computed_tokens: int = 0


_SINK = CaptureSink()


def current_sink() -> CaptureSink:
    """The process's sink; one encoder engine runs at a time."""
    return _SINK


def reset_sink() -> CaptureSink:
    """Forgets the previous engine's pool (a new engine follows)."""
    global _SINK
    _SINK = CaptureSink()
    return _SINK


class CaptureConnector(KVConnectorBase_V1):
    """Keeps what the engine computed; never loads."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_model(vllm_config)
        self._config = vllm_config
        self._num_blocks = kv_cache_config.num_blocks
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedModelError("layers of several kinds: encode one attention kind only")

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Allocates the pool and hooks every layer."""
        layers = attention_layers(self._config)
        rotary = rotary_module(self._config)
        first = layers[0][1]
        sink = current_sink()
        sink.block_size = int(self._config.cache_config.block_size)
        sink.pool = torch.zeros(
            (
                self._num_blocks * sink.block_size,
                len(layers),
                2,
                first.num_kv_heads,
                first.head_size,
            ),
            dtype=self._config.model_config.dtype,
            device=first.kv_cache.device,
        )
        _hook_layers(layers, rotary, sink)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Gathers the wanted rows before the blocks are freed."""
        sink = current_sink()
        count = sink.wanted(request.request_id)
        if count and sink.pool is not None:
            end = request.num_prompt_tokens
            positions = torch.arange(end - count, end)
            slots = slot_mapping(tuple(block_ids), positions, sink.block_size)
            sink.captured[request.request_id] = sink.pool.index_select(
                0, slots.to(sink.pool.device)
            ).cpu()
        return False, None

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Nothing is loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """Nothing is loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """No metadata is needed."""
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """The hooks have saved it."""

    def wait_for_save(self) -> None:
        """The hooks have saved it."""


def _hook_layers(layers: list[tuple[str, Any]], rotary: Any, sink: CaptureSink) -> None:
    pending: list[torch.Tensor] = []

    def before_rope(module: Any, args: tuple[Any, ...]) -> None:
        # The op rotates in place, so the keys are copied first.
        pending[:] = [args[2].clone()]

    def before_attention(index: int, name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            slots = None
            if is_forward_context_available():
                mapping = get_forward_context().slot_mapping
                slots = mapping.get(name) if isinstance(mapping, dict) else None
            if slots is None or not pending or sink.pool is None:
                pending.clear()
                return  # a profiling run
            count = slots.shape[0]
            shape = (count, module.num_kv_heads, module.head_size)
            kept = slots >= 0
            rows = slots[kept]
            if index == 0:
                sink.computed_tokens += int(rows.shape[0])
            keys = pending.pop()[:count].view(shape)
            values = args[2][:count].view(shape)
            sink.pool[rows, index, 0] = keys[kept]
            sink.pool[rows, index, 1] = values[kept]

        return hook

    rotary.register_forward_pre_hook(before_rope)
    for index, (name, module) in enumerate(layers):
        module.register_forward_pre_hook(before_attention(index, name))
