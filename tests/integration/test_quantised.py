"""Quantised KV through the real engine, from the DRAM arena and from the GPU arena."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.integration.checkpoints import make_checkpoint
from tests.integration.commands import run_cli, sample_facts
from tests.integration.engine import (
    assert_same,
    encode,
    encoder,
    max_difference,
    random_ids,
    random_pieces,
    serve,
)
from tests.integration.served import serve as serve_model

from inferscale_runtime.packing.rows import PackedKV
from inferscale_runtime.store.store import Store

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


def test_from_the_store_to_the_answer(smollm2: Path, tmp_path: Path) -> None:
    source, store = tmp_path / "facts.jsonl", tmp_path / "store"
    source.write_text("".join(json.dumps(fact) + "\n" for fact in sample_facts(8)))
    encode = ["encode", "--input", str(source), "--model", str(smollm2), "--store", str(store)]
    encode += ["--dtype", "float32", "--policy", "all", "--kv-dtype", "int8"]
    done = run_cli(*encode)
    assert done.returncode == 0, done.stderr
    opened = Store.open(str(store))
    (user,) = opened.users()
    memory = opened.read_user(user)
    assert memory is not None
    ((fingerprint, table),) = memory.encodings.items()
    found = opened.read_segments(user, list(table.values()))
    assert len(found) == 8
    assert all(isinstance(kv, PackedKV) and kv.shape.kind == "int8" for kv in found)
    listed = run_cli("store", "ls", str(store))
    assert f"fingerprint {fingerprint}: kv int8" in listed.stdout

    flags = ["--store", str(store), "--kv-dtype", "int8"]
    flags += ["--", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 29)]
    with serve_model(smollm2, "float32", tmp_path / "server.log", *flags) as served:

        def ask(mode: str) -> tuple[dict[str, Any], dict[str, float]]:
            body = {
                "model": "smollm2",
                "messages": [{"role": "user", "content": "What is my dog called?"}],
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 5,
                "memory": {"user": user, "k": 8, "order": "stored", "mode": mode},
            }
            answer = served.client.post("/v1/chat/completions", json=body).json()
            first = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return answer["usage"]["memory"], {item["token"]: item["logprob"] for item in first}

        usage, injected = ask("injected")
        assert (usage["mode"], usage["facts"], usage["reason"]) == ("injected", 8, None)
        _, text = ask("text")
    # With the policy `all` plain injection is exact, so this is what quantising changes.
    assert max(injected, key=injected.__getitem__) == max(text, key=text.__getitem__)
    common = injected.keys() & text.keys()
    assert len(common) >= 4
    assert max(abs(injected[token] - text[token]) for token in common) < 0.3
