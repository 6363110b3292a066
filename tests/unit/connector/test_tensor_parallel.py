"""Several ranks of one server: real scheduler side, workers, arenas and writers, toy layers.

Every rank maps the one slab and writes its own heads; what one rank alone would have written is the
measure, byte for byte. The cache is laid out as vLLM's CPU backend does, so that the compiled
writer takes part.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inferscale_runtime.config import TierConfig
from inferscale_runtime.connector import worker as worker_module
from inferscale_runtime.connector.capability import PARAMS_KEY, Claim, seal_claim
from inferscale_runtime.connector.scheduler import SchedulerSide
from inferscale_runtime.connector.support import TensorRank, check_model, head_range
from inferscale_runtime.connector.worker import WorkerSide
from inferscale_runtime.errors import UnsupportedModelError
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.device_arena import DeviceArena
from inferscale_runtime.tiers.slab import (
    SlabShape,
    create_run_files,
    load_secret,
    map_leases,
    map_slab,
    map_stamps,
)

NUM_LAYERS, HEAD_DIM, BLOCK, NUM_BLOCKS, ROWS = 3, 32, 32, 8, 96
HALF_ROW = NUM_LAYERS * 2 * HEAD_DIM * 4
"""Bytes that one token takes for one head."""


class Layer:
    """A layer whose cache has the packed layout: keys ``[dim, block]``, then values."""

    kv_cache_dtype = "auto"

    def __init__(self, heads: int) -> None:
        self.impl = self
        self.kv_cache = torch.full((NUM_BLOCKS, heads, BLOCK, 2 * HEAD_DIM), -1.0)

    def do_kv_cache_update(
        self, layer: Any, keys: Any, values: Any, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        flat = cache.view(*cache.shape[:2], 2, -1)
        key_part = flat[:, :, 0].view(*cache.shape[:2], HEAD_DIM, BLOCK)
        value_part = flat[:, :, 1].view(*cache.shape[:2], BLOCK, HEAD_DIM)
        key_part[slots // BLOCK, :, :, slots % BLOCK] = keys
        value_part[slots // BLOCK, :, slots % BLOCK] = values


class Rotary:
    """Rotates halves by a table."""

    is_neox_style = True

    def __init__(self) -> None:
        angles = torch.rand(512, HEAD_DIM // 2, generator=torch.Generator().manual_seed(3))
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], 1)

    def __call__(self, positions: torch.Tensor, keys: torch.Tensor, _: None) -> Any:
        heads = keys.unflatten(1, (-1, HEAD_DIM))
        cosine, sine = self.cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)
        x, y = (part.clone() for part in heads.chunk(2, -1))
        heads[..., : HEAD_DIM // 2] = x * cosine - y * sine
        heads[..., HEAD_DIM // 2 :] = y * cosine + x * sine
        return keys, None


class Server:
    """The API process's arena and the engine's scheduler side, with as many ranks as asked for."""

    def __init__(self, folder: Path, num_kv_heads: int) -> None:
        self.folder = folder
        self.num_kv_heads = num_kv_heads
        shape = SlabShape(ROWS, NUM_LAYERS, num_kv_heads, HEAD_DIM, "float32")
        create_run_files(folder, shape)
        self.arena = Arena(
            map_slab(folder, shape), map_leases(folder), stamps=map_stamps(folder, shape)
        )
        self.scheduler = SchedulerSide(folder, 1 << 40)
        self.rng = random.Random(5)
        self._workers: list[WorkerSide] = []
        self._count = 0

    def rank(
        self, index: int, size: int, *, writer: str = "portable", gpu_bytes: int = 0
    ) -> WorkerSide:
        heads = head_range(self.num_kv_heads, TensorRank(index, size))
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK),
            model_config=SimpleNamespace(
                get_total_num_kv_heads=lambda: self.num_kv_heads,
                get_head_size=lambda: HEAD_DIM,
                dtype=torch.float32,
            ),
            layers=[(f"layers.{n}", Layer(heads.stop - heads.start)) for n in range(NUM_LAYERS)],
        )
        group = SimpleNamespace(layer_names=[name for name, _ in config.layers])
        made = WorkerSide(
            config,
            SimpleNamespace(kv_cache_groups=[group]),
            self.folder,
            writer,
            TierConfig(gpu_bytes=gpu_bytes),
            TensorRank(index, size),
        )
        made.register_kv_caches()
        self._workers.append(made)
        return made

    def put(self, key: str, rows: int) -> None:
        shape = (rows, NUM_LAYERS, 2, self.num_kv_heads, HEAD_DIM)
        generator = torch.Generator().manual_seed(self.rng.getrandbits(30))
        assert self.arena.put(key, torch.randn(shape, generator=generator))

    def inject(self, keys: Sequence[str], cached: int, ranks: Sequence[WorkerSide]) -> int:
        """One request from lease to end; each rank gets the step's metadata as its process does."""
        lease = self.arena.acquire(keys)
        assert lease is not None
        claimed = sum(rows for _, rows in lease.runs)
        self._count += 1
        prompt = list(range(claimed + 5))
        claim = Claim(claimed, lease.runs, lease.slot, lease.generation)
        sealed = seal_claim(load_secret(self.folder), claim, "salt", prompt)
        request = SimpleNamespace(
            trace_headers=None,
            request_id=str(self._count),
            kv_transfer_params={PARAMS_KEY: sealed},
            cache_salt="salt",
            prompt_token_ids=prompt,
            num_prompt_tokens=len(prompt),
        )
        blocks = self.rng.sample(range(1, NUM_BLOCKS), -(-len(prompt) // BLOCK))
        found, _ = self.scheduler.get_num_new_matched_tokens(request, cached)
        assert found == claimed - cached
        allocated = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(request, allocated, found)
        step = pickle.dumps(self.scheduler.build_connector_meta())
        for rank in ranks:
            rank.start_load(pickle.loads(step))
        self.scheduler.request_finished(request)
        self.arena.end(lease, submitted=True)
        assert self.arena.pinned_rows == 0
        return found

    def stop(self) -> None:
        for made in self._workers:
            made.stop()


def bytes_of(rank: WorkerSide) -> torch.Tensor:
    """``[layers, blocks, heads, ...]``, as bit patterns."""
    return torch.stack([layer.module.kv_cache for layer in rank._layers]).view(torch.int32)


def together(ranks: Sequence[WorkerSide]) -> torch.Tensor:
    return torch.cat([bytes_of(rank) for rank in ranks], 2)


@pytest.fixture(scope="module")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library_folder: Path
) -> Iterator[Callable[[int], Server]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(library_folder))
    monkeypatch.setattr(worker_module, "attention_layers", lambda config: config.layers)
    monkeypatch.setattr(worker_module, "rotary_module", lambda config: Rotary())
    started: list[Server] = []

    def make(num_kv_heads: int) -> Server:
        started.append(Server(tmp_path, num_kv_heads))
        return started[-1]

    yield make
    for server in started:
        server.stop()


@pytest.mark.parametrize(
    ("writer", "gpu_bytes", "used"),
    [("portable", 0, "portable"), ("auto", 0, "native"), ("auto", 1 << 20, "portable")],
)
def test_two_ranks_write_what_one_writes(
    start: Callable[[int], Server], writer: str, gpu_bytes: int, used: str
) -> None:
    server = start(4)
    alone = server.rank(0, 1)
    ranks = [server.rank(n, 2, writer=writer, gpu_bytes=gpu_bytes) for n in range(2)]
    assert [r._choice.name for r in ranks if r._choice] == [used, used]
    server.put("a", 11)
    server.put("b", 20)
    server.inject(["a", "b"], 0, [alone, *ranks])
    assert torch.equal(together(ranks), bytes_of(alone))
    assert (together(ranks) != torch.tensor(-1.0).view(torch.int32)).any()
    assert [(r._tier is not None) for r in ranks] == [gpu_bytes > 0] * 2

    # What comes into the slab later is seen by all, and the engine's own cache hit is left out.
    server.put("c", 37)
    before = bytes_of(alone).clone()
    server.inject(["a", "c"], 7, [alone, *ranks])
    assert torch.equal(together(ranks), bytes_of(alone))
    assert not torch.equal(bytes_of(alone), before)


@pytest.mark.parametrize(("writer", "gpu_bytes"), [("portable", 0), ("auto", 0), ("auto", 1 << 20)])
def test_ranks_beyond_the_kv_heads_share_them(
    start: Callable[[int], Server], writer: str, gpu_bytes: int
) -> None:
    server = start(2)
    alone = server.rank(0, 1)
    ranks = [server.rank(n, 4, writer=writer, gpu_bytes=gpu_bytes) for n in range(4)]
    server.put("a", 40)
    server.inject(["a"], 0, [alone, *ranks])
    expected = bytes_of(alone)
    for rank, head in zip(ranks, (0, 0, 1, 1), strict=True):
        assert torch.equal(bytes_of(rank), expected[:, :, head : head + 1])
    assert not torch.equal(expected[:, :, 0], expected[:, :, 1])


def test_gpu_arenas_of_different_sizes_change_no_byte(start: Callable[[int], Server]) -> None:
    server = start(2)
    alone = server.rank(0, 1)
    sizes = (ROWS * HALF_ROW, 30 * HALF_ROW, HALF_ROW)
    pairs = [
        [server.rank(0, 2, gpu_bytes=sizes[0]), server.rank(1, 2, gpu_bytes=size)] for size in sizes
    ]
    everyone = [alone, *(rank for pair in pairs for rank in pair)]
    keys = [f"k{n}" for n in range(9)]
    for step in range(20):
        # More than fits: what is written again has other bytes in the rows of what went.
        for key in server.rng.sample(keys, 3):
            if not server.arena.resident([key]):
                server.put(key, server.rng.randrange(9, 30))
        held = sorted(server.arena.resident(keys))
        chosen = server.rng.sample(held, min(2, len(held)))
        server.inject(chosen, server.rng.randrange(9), everyone)
        for pair in pairs:
            assert torch.equal(together(pair), bytes_of(alone)), step
    hits = [pair[1]._tier._arena.figures.hits for pair in pairs if pair[1]._tier]
    assert hits[0] > hits[1] > hits[2], "the arenas did not differ"
    assert server.arena.evictions > 0


def test_a_rank_without_room_for_its_gpu_arena_writes_the_same(
    start: Callable[[int], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def arena(slab: Any, stamps: Any, heads: slice, *rest: Any) -> DeviceArena:
        if heads.start:
            raise RuntimeError("out of memory")
        return DeviceArena(slab, stamps, heads, *rest)

    monkeypatch.setattr(worker_module, "DeviceArena", arena)
    server = start(2)
    alone = server.rank(0, 1)
    ranks = [server.rank(n, 2, gpu_bytes=1 << 20) for n in range(2)]
    server.put("a", 21)
    for _ in range(2):
        server.inject(["a"], 0, [alone, *ranks])
        assert torch.equal(together(ranks), bytes_of(alone))
    assert [rank._tier is None for rank in ranks] == [False, True]


@pytest.mark.parametrize(("heads", "size"), [(8, 3), (2, 3), (4, 6)])
def test_heads_that_cannot_be_shared_evenly_are_refused_at_start(heads: int, size: int) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
            use_mla=False,
            get_total_num_kv_heads=lambda: heads,
        ),
        lora_config=None,
        speculative_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=size),
    )
    with pytest.raises(UnsupportedModelError, match=f"size {size}: {heads} KV heads"):
        check_model(config)
    config.parallel_config.tensor_parallel_size = 2 * heads
    check_model(config)


@pytest.mark.parametrize(("heads", "size"), [(8, 1), (8, 2), (8, 8), (2, 8), (1, 4)])
def test_every_head_has_as_many_ranks(heads: int, size: int) -> None:
    owners = [0] * heads
    for index in range(size):
        part = head_range(heads, TensorRank(index, size))
        for head in range(part.start, part.stop):
            owners[head] += 1
    assert set(owners) == {max(1, size // heads)}
