"""Quantised KV through the real engine: what is unpacked there is what was quantised."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
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

from inferscale_runtime.packing.rows import channel_exponents, pack

pytestmark = pytest.mark.vllm


def test_rows_in_memory_are_quantised_and_the_engine_unpacks_them(
    checkpoints: Path, tmp_path: Path
) -> None:
    model = make_checkpoint("llama", checkpoints)
    with encoder(model) as engine:
        memory = encode(engine, random_pieces(5))
    ids = (*memory.token_ids, *random_ids(random.Random(6), 19))
    exponents = channel_exponents(memory.kv[0])
    text = None
    for kind, bound in (("int8", 0.1), ("fp8", 0.3)):
        folders = [tmp_path / f"{kind}-{name}" for name in ("packed", "device", "plain")]
        for folder in folders:
            folder.mkdir()
        with serve(model, folders[0], kv_dtype=kind) as served:
            keys = served.put("a", memory)
            assert served.arena.row_bytes * 3 < memory.kv[0][0].nbytes
            text = text or served.text(ids)
            packed = served.inject(keys, ids)
        assert max_difference(packed, text) < bound
        with serve(model, folders[1], kv_dtype=kind, gpu_bytes=1 << 20) as served:
            assert_same(served.inject(served.put("a", memory), ids), packed)
        rounded = replace(
            memory,
            kv=tuple(pack(kv, kind, exponents).unpack(torch.float32) for kv in memory.kv),
        )
        with serve(model, folders[2]) as served:
            plain = served.inject(served.put("a", rounded), ids)
        assert plain.tokens == packed.tokens
        assert max_difference(plain, packed) < 1e-5
