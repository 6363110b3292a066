"""Worker side of the connector: writes stored KV into the paged cache (worker process).

All of a step's loads run before the forward, on the current stream, through each layer's own
``do_kv_cache_update``: the only writer that is right for every backend's cache layout, and the one
that quantises for FP8 caches. The rotary tables are those of the module that the model itself uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from inferscale_runtime.connector.scheduler import InjectionMetadata, Load
from inferscale_runtime.connector.support import attention_layers, rotary_module
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.inject.rotation import rotate_keys
from inferscale_runtime.tiers.slab import load_shape, map_slab


@dataclass(frozen=True, slots=True)
class _Layer:
    index: int
    module: Any
    group: int


class WorkerSide:
    """Gathers, rotates and writes segments."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, run_dir: Path) -> None:
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._run_dir = run_dir
        self._slab: torch.Tensor | None = None
        self._layers: list[_Layer] = []
        self._heads = slice(0, 0)
        self._rotary: Any = None
        self._block_size = int(vllm_config.cache_config.block_size)

    def register_kv_caches(self) -> None:
        """Finds the layers and the rotary module; refuses what is not supported, by name."""
        groups = {
            name: index
            for index, group in enumerate(self._kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        self._layers = [
            _Layer(index, module, groups[name])
            for index, (name, module) in enumerate(attention_layers(self._config))
        ]
        self._rotary = rotary_module(self._config)

    def _open(self) -> torch.Tensor:
        if self._slab is None:
            shape = load_shape(self._run_dir)
            assert shape is not None, "a claim was opened before the slab was there"
            if shape.num_layers != len(self._layers):
                raise ConfigError(
                    f"slab: {shape.num_layers} layers, this rank has {len(self._layers)}; "
                    "pipeline parallelism is not supported"
                )
            self._heads = head_range(
                shape.num_kv_heads,
                get_tensor_model_parallel_rank(),
                get_tensor_model_parallel_world_size(),
            )
            self._slab = map_slab(self._run_dir, shape)
        return self._slab

    def start_load(self, metadata: InjectionMetadata) -> None:
        """Writes every load of this step; returns when the writes are enqueued."""
        for load in metadata.loads:
            self._load(load)

    def _load(self, load: Load) -> None:
        slab = self._open()
        rows = torch.cat([torch.arange(start, start + count) for start, count in load.runs])
        rows = rows[load.first : load.last]
        positions = torch.arange(load.first, load.last)
        device = self._layers[0].module.kv_cache.device
        slots = [slot_mapping(ids, positions, self._block_size) for ids in load.block_ids]
        cos_sin = self._rotary.cos_sin_cache
        dtype = self._config.model_config.dtype
        for layer in self._layers:
            slot = slots[layer.group]
            kept = slot >= 0
            if bool(kept.all()):
                source, where, target = rows, positions, slot
            else:  # sliding window: blocks outside the window are null
                source, where, target = rows[kept], positions[kept], slot[kept]
            # One gather a layer stays in cache; all layers at once would pass through memory twice.
            kv = slab[:, layer.index, :, self._heads].index_select(0, source)
            kv = kv.to(device=device, dtype=dtype, non_blocking=True)
            keys = rotate_keys(
                kv[:, 0],
                where.to(device),
                cos_sin.to(device=device, dtype=dtype),
                is_neox=self._rotary.is_neox_style,
            )
            layer.module.impl.do_kv_cache_update(
                layer.module,
                keys,
                kv[:, 1].contiguous(),
                layer.module.kv_cache,
                target.to(device),
            )


def slot_mapping(
    block_ids: tuple[int, ...], positions: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Cache slots of prompt positions.

    Args:
        block_ids: The request's blocks; 0 is vLLM's null block (outside a sliding window).
        positions: ``[num_tokens]`` int64.
        block_size: Tokens in a block.

    Returns:
        ``[num_tokens]`` int64, -1 where there is no block.
    """
    blocks = torch.tensor(block_ids, dtype=torch.int64)[positions // block_size]
    slots = blocks * block_size + positions % block_size
    return torch.where(blocks == 0, torch.full_like(slots, -1), slots)


def head_range(num_kv_heads: int, rank: int, world_size: int) -> slice:
    """KV heads of one tensor-parallel rank (vLLM 0.32 ``models/llama.py``: split or replicated)."""
    if num_kv_heads >= world_size:
        share = num_kv_heads // world_size
        return slice(rank * share, (rank + 1) * share)
    head = rank // (world_size // num_kv_heads)
    return slice(head, head + 1)
