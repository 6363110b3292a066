"""``inferscale bench`` for real, as small as it gets; the figures themselves are not judged."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.commands import ENVIRONMENT, command, run_cli

pytestmark = pytest.mark.vllm

START_TIMEOUT_S = 600


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the facts are encoded once."""
    return tmp_path_factory.mktemp("bench")


def ttft_arguments(smollm2: Path, workdir: Path) -> list[str]:
    arguments = ["bench", "ttft", "--model", str(smollm2), "--workdir", str(workdir)]
    return [*arguments, "--k", "1,2", "--repeats", "2", "--users", "1"]


def check_document(file: Path, bench: str) -> list[dict[str, Any]]:
    document = json.loads(file.read_text())
    assert document["bench"] == bench
    assert document["seed"] == 0
    assert {"cpu", "cores", "memory_bytes"} <= document["machine"].keys()
    assert {"vllm", "torch", "python", "inferscale"} <= document["versions"].keys()
    rows: list[dict[str, Any]] = document["rows"]
    times = {key for row in rows for key in row if key.endswith("_p50_ms") and "minus" not in key}
    assert all(row[key] > 0 for row in rows for key in times if key in row)
    return rows


@pytest.mark.slow
def test_ttft(smollm2: Path, workdir: Path) -> None:
    file, plot = workdir / "ttft.json", workdir / "ttft.png"
    done = run_cli(*ttft_arguments(smollm2, workdir), "--json", str(file), "--plot", str(plot))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = check_document(file, "ttft")
    assert [row["k"] for row in rows] == [1, 2]
    assert rows[1]["prompt_tokens"] > rows[0]["prompt_tokens"]
    for name in ("text", "injected", "floor"):
        assert {f"{name}_p50_ms", f"{name}_p95_ms"} <= rows[0].keys()
    assert {"text_per_injected", "injected_per_floor"} <= rows[0].keys()
    assert "text/injected" in done.stdout
    assert "growth from k=1 to k=2" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_throughput(smollm2: Path, workdir: Path) -> None:
    file = workdir / "throughput.json"
    done = run_cli(
        *("bench", "throughput", "--model", str(smollm2), "--workdir", str(workdir)),
        *("--k", "2", "--users", "3", "--concurrency", "2", "--requests", "4"),
        *("--max-tokens", "3", "--json", str(file)),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = check_document(file, "throughput")
    assert [(row["mode"], row["state"]) for row in rows] == [
        ("injected", "cold"),
        ("injected", "warm"),
        ("text", "warm"),
    ]
    assert all(row["queries_per_s"] > 0 and row["concurrency"] == 2 for row in rows)
    assert rows[1]["as_text"] == 0, "warm facts are injected"


def test_inject(smollm2: Path, workdir: Path) -> None:
    file = workdir / "inject.json"
    done = run_cli(
        *("bench", "inject", "--model", str(smollm2), "--tokens", "40,300"),
        *("--repeats", "2", "--json", str(file)),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = check_document(file, "inject")
    assert [row["tokens"] for row in rows] == [40, 300]
    # 30 layers, keys and values of 3 heads of 64 float32 each.
    assert rows[1]["megabytes"] == round(300 * 30 * 2 * 3 * 64 * 4 / 1e6, 2)
    assert {"portable_gb_per_s", "memcpy_gb_per_s"} <= rows[0].keys()
    has_writer = {"native_gb_per_s", "int8_gb_per_s", "fp8_gb_per_s"} <= rows[0].keys()
    assert has_writer or "no faster writer: " in done.stdout


@pytest.mark.slow
def test_encode(smollm2: Path, workdir: Path) -> None:
    file = workdir / "encode.json"
    done = run_cli(
        *("bench", "encode", "--model", str(smollm2), "--prompts", "3"),
        *("--prompt-tokens", "40", "--kept-tokens", "8", "--passes", "1", "--rounds", "1"),
        *("--json", str(file)),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = check_document(file, "encode")
    assert row["encode_tokens_per_s"] > 0
    assert row["prefill_tokens_per_s"] > 0


@pytest.mark.slow
def test_interrupt_stops_the_server(smollm2: Path, workdir: Path) -> None:
    log = workdir / "interrupted.log"
    process = subprocess.Popen(
        command(*ttft_arguments(smollm2, workdir), "--server-log", str(log)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stderr is not None
    deadline = time.monotonic() + START_TIMEOUT_S
    while not log.exists() or not log.stat().st_size:
        assert process.poll() is None, process.stderr.read()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children, "the server is a child"
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
