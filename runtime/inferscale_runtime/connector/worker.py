"""Worker side of the connector (worker process): finds layers, blocks and rope for the writer.

All of a step's loads run before the forward, on the current stream.
"""

from __future__ import annotations

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
from inferscale_runtime.inject.writer import LayerTarget, Placement, PortableWriter
from inferscale_runtime.tiers.slab import load_shape, map_slab


class WorkerSide:
    """Writes segments into this rank's cache."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, run_dir: Path) -> None:
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._run_dir = run_dir
        self._writer: PortableWriter | None = None
        self._layers: list[LayerTarget] = []
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
            LayerTarget(index, module, groups[name])
            for index, (name, module) in enumerate(attention_layers(self._config))
        ]
        self._rotary = rotary_module(self._config)

    def _open(self) -> PortableWriter:
        if self._writer is None:
            shape = load_shape(self._run_dir)
            assert shape is not None, "a claim was opened before the slab was there"
            if shape.num_layers != len(self._layers):
                raise ConfigError(
                    f"slab: {shape.num_layers} layers, this rank has {len(self._layers)}; "
                    "pipeline parallelism is not supported"
                )
            heads = head_range(
                shape.num_kv_heads,
                get_tensor_model_parallel_rank(),
                get_tensor_model_parallel_world_size(),
            )
            self._writer = PortableWriter(map_slab(self._run_dir, shape), heads, self._rotary)
        return self._writer

    def start_load(self, metadata: InjectionMetadata) -> None:
        """Writes every load of this step; returns when the writes are enqueued."""
        for load in metadata.loads:
            self._open().write(self._layers, self._placements(load))

    def _placements(self, load: Load) -> list[Placement]:
        rows = torch.cat([torch.arange(start, start + count) for start, count in load.runs])
        rows = rows[load.first : load.last]
        positions = torch.arange(load.first, load.last)
        device = self._layers[0].module.kv_cache.device
        result = []
        for block_ids in load.block_ids:
            slots = slot_mapping(block_ids, positions, self._block_size)
            kept = slots >= 0  # sliding window: blocks outside the window are null
            result.append(Placement(rows[kept], positions[kept].to(device), slots[kept].to(device)))
        return result


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
