"""Quantised KV through the real engine, from the DRAM arena and from the GPU arena."""

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

pytestmark = pytest.mark.vllm


def test_rows_in_memory_are_quantised_and_the_engine_unpacks_them(
    checkpoints: Path, tmp_path: Path
) -> None:
    model = make_checkpoint("llama", checkpoints)
    with encoder(model) as engine:
        memory = encode(engine, random_pieces(5))
    ids = (*memory.token_ids, *random_ids(random.Random(6), 19))
    folders = [tmp_path / name for name in ("dram", "device")]
    for folder in folders:
        folder.mkdir()
    with serve(model, folders[0], kv_dtype="int8") as served:
        keys = served.put("a", memory)
        assert served.arena.row_bytes * 3 < memory.kv[0][0].nbytes
        text = served.text(ids)
        packed = served.inject(keys, ids)
        wrong = served.inject([keys[0], *reversed(keys[1:])], ids)
    # Measured: 0.04 with a model of random weights, whose logits are nearly flat.
    assert max_difference(packed, text) < 0.1
    assert max_difference(packed, text) < max_difference(wrong, text) / 3
    with serve(model, folders[1], kv_dtype="int8", gpu_bytes=1 << 20) as served:
        assert_same(served.inject(served.put("a", memory), ids), packed)
