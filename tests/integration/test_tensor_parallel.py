"""Two CPU ranks of a real engine: each maps the one slab and writes its own heads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.integration.checkpoints import make_checkpoint
from tests.integration.engine import (
    assert_same,
    encode,
    encoder,
    max_difference,
    random_ids,
    random_pieces,
    serve,
)

from inferscale_runtime.tiers.slab import load_shape, map_slab

pytestmark = pytest.mark.vllm


@pytest.mark.slow
@pytest.mark.parametrize("gpu_bytes", [0, 64 << 20])
def test_two_ranks_give_what_text_gives(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_bytes: int
) -> None:
    # vLLM binds each rank to a NUMA node of its own unless it is told to bind none.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = make_checkpoint("llama3", checkpoints)
    with encoder(model) as engine:
        memory = encode(engine, random_pieces(3))
    ids = (*memory.token_ids, *random_ids(random.Random(4), 19))
    with serve(
        model,
        tmp_path,
        gpu_bytes=gpu_bytes,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    ) as served:
        keys = served.put("a", memory)
        expected = served.text(ids)
        for _ in range(2):
            assert_same(served.inject(keys, ids), expected)
        found = sorted(path.name for path in tmp_path.glob("device-*.json"))
        assert found == (["device-0.json", "device-1.json"] if gpu_bytes else [])
        if not gpu_bytes:
            # The control: the ranks read the slab, and both of its heads count.
            shape = load_shape(tmp_path)
            assert shape is not None
            map_slab(tmp_path, shape)[:, :, :, 1].zero_()
            assert max_difference(served.inject(keys, ids), expected) > 1e-2
