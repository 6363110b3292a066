"""Worker side of the connector (worker process): finds layers, blocks and rope for the writer.

All of a step's loads run before the forward, on the current stream. With a GPU arena their rows
come from it, else from the DRAM arena. The Triton writer takes all loads of a step at once; the
others take one after the other, because few rows stay in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from inferscale_runtime.config import TierConfig
from inferscale_runtime.connector.scheduler import InjectionMetadata, Load
from inferscale_runtime.connector.support import (
    TensorRank,
    attention_layers,
    head_range,
    rotary_module,
    tensor_rank,
)
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.inject.check import SlabLayout, Writer, WriterChoice, choose_writer
from inferscale_runtime.inject.gpu import TritonWriter
from inferscale_runtime.inject.writer import (
    LayerTarget,
    Placement,
    PortableWriter,
    Unpacking,
    overlapping_runs,
    slab_rows,
)
from inferscale_runtime.tiers.device_arena import DeviceArena, pin_slab
from inferscale_runtime.tiers.device_tier import DeviceTier
from inferscale_runtime.tiers.slab import (
    SlabShape,
    enter_pages,
    load_exponents,
    load_shape,
    map_slab,
    map_stamps,
)
from inferscale_runtime.tracing import span_under

logger = init_logger("vllm.inferscale.worker")


class WorkerSide:
    """Writes segments into this rank's cache.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's KV cache groups.
        run_dir: The server's shared-memory files.
        writer: ``inject.writer`` of the configuration.
        tiers: ``tiers`` of the configuration.
        rank: Of this worker; vLLM's own by default, which exists in a worker process only.
        kv_dtype: How the slab keeps KV: ``auto``, ``int8`` or ``fp8``.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        run_dir: Path,
        writer: str = "auto",
        tiers: TierConfig | None = None,
        rank: TensorRank | None = None,
        kv_dtype: str = "auto",
    ) -> None:
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._run_dir = run_dir
        self._tiers = tiers or TierConfig()
        self._mode = writer
        self._rank = rank or tensor_rank()
        self._tier: DeviceTier | None = None
        self._heads = slice(None)
        self._kv_dtype = kv_dtype
        self._layout: SlabLayout | None = None
        self._unpacking: Unpacking | None = None
        self._rotary: Any = None
        self._choice: WriterChoice | None = None
        self._writer: Writer | None = None
        self._layers: list[LayerTarget] = []
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
        model = self._config.model_config
        num_kv_heads = int(model.get_total_num_kv_heads())
        self._heads = head_range(num_kv_heads, self._rank)
        layout = SlabLayout(
            len(self._layers),
            num_kv_heads,
            int(model.get_head_size()),
            model.dtype,
            self._heads,
            self._kv_dtype,
        )
        self._layout = layout
        self._rotary = rotary_module(self._config)
        # Now, not with the first request: building and proving the native writer takes seconds.
        mode = self._mode
        if self._tiers.gpu_bytes and self._layers[0].module.kv_cache.device.type == "cpu":
            mode = "portable"  # the native writer reads no arena but the slab
        choice = choose_writer(mode, self._layers, self._rotary, layout)
        reason = f" ({choice.reason})" if choice.reason else ""
        logger.info("inject: the %s writer is used%s", choice.name, reason)
        self._choice = choice

    def _open(self) -> Writer:
        if self._writer is None:
            assert self._choice is not None, "a claim was opened before the cache was there"
            assert self._layout is not None
            shape = load_shape(self._run_dir)
            assert shape is not None, "a claim was opened before the slab was there"
            if shape.num_layers != len(self._layers):
                raise ConfigError(
                    f"slab: {shape.num_layers} layers, this rank has {len(self._layers)}; "
                    "pipeline parallelism is not supported"
                )
            slab = map_slab(self._run_dir, shape)
            enter_pages(slab, write=False)
            exponents = load_exponents(self._run_dir, shape)
            self._writer = self._choice.open(slab, exponents)
            unpacking = self._layout.unpacking(exponents)
            self._unpacking = unpacking.of_rank(self._heads) if unpacking else None
            if self._tiers.gpu_bytes:
                self._tier = self._open_tier(slab, shape)
        return self._writer

    def _open_tier(self, slab: torch.Tensor, shape: SlabShape) -> DeviceTier | None:
        device = self._layers[0].module.kv_cache.device
        stamps = map_stamps(self._run_dir, shape)
        try:
            arena = DeviceArena(slab, stamps, self._heads, self._tiers.gpu_bytes, device)
        except RuntimeError as error:  # torch's own out-of-memory errors are of this kind
            logger.warning(
                "tiers.gpu_bytes %d: no room on %s (%s); rows come from the DRAM arena",
                self._tiers.gpu_bytes,
                device,
                str(error).partition("\n")[0],
            )
            return None
        if device.type == "cuda" and not pin_slab(slab):
            logger.warning("the DRAM arena cannot be pinned: copies to the GPU wait for each other")
        tier = DeviceTier(arena, self._run_dir, self._rank.index, self._tiers.plan_file)
        tier.start()
        return tier

    def stop(self) -> None:
        """Ends the upkeep of the GPU arena."""
        if self._tier is not None:
            self._tier.stop()

    def start_load(self, metadata: InjectionMetadata) -> None:
        """Writes every load of this step; returns when the writes are enqueued."""
        if not metadata.loads:
            return
        writer = self._open()
        if isinstance(writer, TritonWriter):
            self._write_loads(writer, metadata.loads)
            return
        for load in metadata.loads:
            self._write_loads(writer, [load])

    def _write_loads(self, writer: Writer, loads: Sequence[Load]) -> None:
        with ExitStack() as spans:
            for load in loads:
                tokens = load.last - load.first
                # What is written in one launch takes each of its requests as long.
                spans.enter_context(
                    span_under(load.trace, "inject.load", tokens=tokens, requests=len(loads))
                )
            self._write_rows(writer, loads)

    def _write_rows(self, writer: Writer, loads: Sequence[Load]) -> None:
        if self._tier is None:
            places = [
                self._placements(load, slab_rows(load.runs)[load.first : load.last])
                for load in loads
            ]
            writer.write(self._layers, _joined(places))
            return
        runs: list[tuple[int, int]] = []
        places = []
        done = 0
        for load in loads:
            kept, first = overlapping_runs(load.runs, load.first, load.last)
            rows = torch.arange(load.first - first, load.last - first) + done
            places.append(self._placements(load, rows.to(self._tier.device)))
            runs += kept
            done += sum(count for _, count in kept)
        brought = self._tier.fetch(runs)
        if isinstance(writer, TritonWriter):
            writer.write_from(brought, self._layers, _joined(places))
        else:
            portable = PortableWriter(brought, slice(None), self._rotary, self._unpacking)
            portable.write(self._layers, _joined(places))

    def _placements(self, load: Load, rows: torch.Tensor) -> list[Placement]:
        positions = torch.arange(load.first, load.last)
        device = self._layers[0].module.kv_cache.device
        result = []
        for block_ids in load.block_ids:
            slots = slot_mapping(block_ids, positions, self._block_size)
            at, chosen = positions, rows
            if 0 in block_ids:
                kept = slots >= 0  # sliding window: blocks outside the window are null
                slots, at, chosen = slots[kept], positions[kept], rows[kept.to(rows.device)]
            result.append(Placement(chosen, at.to(device), slots.to(device)))
        return result


def _joined(loads: Sequence[Sequence[Placement]]) -> list[Placement]:
    """The placements of several loads as those of one, for each KV cache group."""
    if len(loads) == 1:
        return list(loads[0])
    return [
        Placement(
            torch.cat([place.rows for place in places]),
            torch.cat([place.positions for place in places]),
            torch.cat([place.slots for place in places]),
        )
        for places in zip(*loads, strict=True)
    ]


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
    # numpy: torch would wake its threads for each of these few numbers.
    places = positions.numpy()
    blocks = np.array(block_ids, dtype=np.int64)[places // block_size]
    slots = blocks * block_size + places % block_size
    return torch.from_numpy(np.where(blocks == 0, -1, slots))
