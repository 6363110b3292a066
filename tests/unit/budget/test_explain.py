"""``inferscale serve --explain-budget``: what it reads, prints and returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferscale_runtime.cli import main

CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "max_position_embeddings": 1000,
    "dtype": "bfloat16",
}
ROW = 2 * 4 * 2 * 32 * 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(bytes(1000))
    return tmp_path


def explain(model: Path, *arguments: str) -> int:
    return main(["serve", "--model", str(model), "--explain-budget", *arguments])


def terms(text: str) -> dict[str, int]:
    """Term to bytes of the printed table."""
    columns = [line.split("  ") for line in text.splitlines() if line[:5] in ("gpu  ", "pod  ")]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in columns]
    return {row[1]: int(row[2]) for row in cells}


def test_prints_the_terms_and_the_flags(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = explain(model, "--gpu-memory-bytes", "8Gi", "--dram-bytes", str(4 << 30))
    output = capsys.readouterr().out
    assert status == 0
    found = terms(output)
    assert found["GPU total"] == 8 << 30
    assert found["weights"] == 2000
    assert found["KV need"] == 1008 * ROW
    assert found["DRAM tier"] == 4 << 30
    assert "--gpu-memory-utilization 0." in output
    assert "/dev/shm 5153960756" in output


def test_vllm_arguments_and_config_are_read(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "runtime.json"
    config.write_text(json.dumps({"tiers": {"dram_bytes": 1 << 31, "gpu_bytes": 1 << 20}}))
    arguments = ["--gpu-memory-bytes", "8Gi", "--config", str(config), "--dtype", "float32", "--"]
    arguments += ["--max-model-len", "2K", "--max-num-seqs=3", "-tp", "2", "--enforce-eager"]
    assert explain(model, *arguments) == 0
    found = terms(capsys.readouterr().out)
    assert found["KV need"] == 3 * 2048 * ROW // 2 * 2
    assert found["GPU arena"] == 1 << 20
    assert found["DRAM tier"] == 1 << 31
    assert found["weights"] == 1000


def test_fp8_cache_halves_the_row(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explain(model, "--gpu-memory-bytes", "8Gi", "--", "--kv-cache-dtype", "fp8_e4m3")
    assert terms(capsys.readouterr().out)["KV need"] == 1008 * ROW // 2


def test_without_gpu(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(model, "--gpu-memory-bytes", "0") == 0
    output = capsys.readouterr().out
    assert f"--kv-cache-memory-bytes {1024 * ROW}" in output
    assert "gpu-memory-utilization" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory-bytes", "1Gi"], "KV need"),
        (["--gpu-memory-bytes", "8Gi", "--gpu-arena", "9Gi"], "lower tiers.gpu.budget"),
        (["--gpu-memory-bytes", "8 gigs"], "quantity '8 gigs'"),
        (["--gpu-memory-bytes", "8Gi", "--", "-tp", "3"], "tensorParallelSize 3"),
        (["--gpu-memory-bytes", "8Gi", "--", "--max-model-len", "many"], "--max-model-len 'many'"),
        (["--config", "missing.json"], "--config 'missing.json'"),
    ],
)
def test_refusals_name_the_reason(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert explain(model, *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_weights_or_config(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    assert explain(model, "--gpu-memory-bytes", "8Gi") == 2
    assert "holds no weights" in capsys.readouterr().err
    broken: Any = model / "config.json"
    broken.write_text("{")
    assert explain(model, "--gpu-memory-bytes", "8Gi") == 2
    assert "config.json" in capsys.readouterr().err
