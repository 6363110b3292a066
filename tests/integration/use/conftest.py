"""One server with a tiny chat model for everything that people use: chats, examples, the page."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.checkpoints import PLAIN_ROPE, SHAPE
from tests.integration.commands import run_cli, sample_facts
from tests.integration.served import Served, serve

NUM_FACTS = 20
KEY = "a-key-for-the-tests-only"
BLOCK = 32
USERS = ("maya", "noah", "zoe", *(f"load-{number:03d}" for number in range(4)))


@pytest.fixture(scope="package")
def chat_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights behind SmolLM2's tokenizer and chat template."""
    import torch
    import transformers as hf

    folder = tmp_path_factory.mktemp("chat-model")
    torch.manual_seed(7)
    tokenizer = hf.AutoTokenizer.from_pretrained(smollm2)
    shape = SHAPE | {"vocab_size": len(tokenizer), "max_position_embeddings": 8192}
    config = hf.LlamaConfig(**shape, rope_parameters=PLAIN_ROPE)
    hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for pattern in ("*token*", "vocab*", "merges*", "chat_template*"):
        for file in smollm2.glob(pattern):
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="package")
def store(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each user has the sample's facts, each read behind all before it."""
    folder = tmp_path_factory.mktemp("use")
    lines = [dict(fact, user=user) for user in USERS for fact in sample_facts(NUM_FACTS)]
    file = folder / "input.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["encode", "--input", str(file), "--model", str(chat_model)]
    arguments += ["--store", str(folder / "store"), "--dtype", "float32", "--policy", "all"]
    done = run_cli(*arguments)
    assert done.returncode == 0, done.stderr
    return folder / "store"


@pytest.fixture(scope="package")
def served(
    chat_model: Path, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The server, which asks for a key; its model is called ``smollm2``."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "key").write_text(KEY)
    config = {"auth": {"mode": "apiKey", "keys_file": str(folder / "key")}}
    (folder / "config.json").write_text(json.dumps(config))
    flags = ["--store", str(store), "--config", str(folder / "config.json")]
    flags += ["--", "--enforce-eager", "--block-size", str(BLOCK)]
    flags += ["--kv-cache-memory-bytes", str(1 << 28), "--enable-prompt-tokens-details"]
    with serve(chat_model, "float32", folder / "server.log", *flags) as opened:
        opened.client.headers["authorization"] = f"Bearer {KEY}"
        deadline = time.monotonic() + 120
        # Then the facts are in the arena, and no request goes as text because reading took long.
        while opened.client.get("/inferscale/v1/ready").status_code != 200:
            assert time.monotonic() < deadline, opened.log.read_text()[-4000:]
            time.sleep(0.2)
        yield opened
