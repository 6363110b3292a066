"""``--explain-budget`` asks the driver when it is not told how large the GPU is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from inferscale_runtime.cli import main

GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    (folder / "model.safetensors").write_bytes(bytes(100))
    return folder


@pytest.mark.parametrize(
    ("state", "lines"),
    [
        (
            f"init 0 every 0 gpu {24 * GIB} 0 0 0 -1 gpu {16 * GIB} 0 0 0 -1",
            ["GPU memory from the driver (Fake H1)", f"{16 * GIB}", "--gpu-memory-utilization"],
        ),
        ("init 9 every 9", ["no GPU (Driver Not Loaded)", "--kv-cache-memory-bytes"]),
        (
            "init 0 every 0 gpu 1 1 3 0 -1",
            ["no GPU (the driver lists none with a memory size)", "--kv-cache-memory-bytes"],
        ),
    ],
)
def test_the_smallest_gpu_counts(
    fake: Callable[[str], None],
    model: Path,
    state: str,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake(state)
    assert main(["serve", "--model", str(model), "--explain-budget"]) == 0
    output = capsys.readouterr().out
    for line in lines:
        assert line in output
