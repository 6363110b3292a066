"""``inferscale encode`` as a command: killed and resumed, and its errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inferscale_runtime.demo.model import build_smollm2
from inferscale_runtime.demo.run import SAMPLE
from inferscale_runtime.store.store import Store

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
NUM_FACTS = 70  # more than one commit of the job


@pytest.fixture(scope="module")
def model() -> Path:
    return build_smollm2(ROOT / "build" / "demo" / "model")


def command(*args: str) -> list[str]:
    return [sys.executable, "-P", "-m", "inferscale_runtime.cli", *args]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def encode_args(model: Path, store: Path, source: Path, *more: str) -> list[str]:
    arguments = ["encode", "--input", str(source), "--model", str(model), "--store", str(store)]
    return [*arguments, "--dtype", "float32", "--policy", "none", *more]


def write_facts(path: Path, count: int) -> Path:
    lines = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    facts = [line for line in lines if line["kind"] == "fact"][:count]
    for fact in facts:
        fact.pop("turn", None)
    path.write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    return path


def num_segments(store: Path) -> int:
    if not (store / "inferscale-store.json").exists():
        return 0
    return sum(sum(user.segments.values()) for user in Store.open(str(store)).user_stats())


def test_killed_job_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    source = write_facts(tmp_path / "facts.jsonl", NUM_FACTS)
    store = tmp_path / "store"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command(*encode_args(model, store, source)),
            stdout=log,
            stderr=log,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        try:
            deadline = time.monotonic() + 240
            while num_segments(store) == 0:
                assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
    kept = num_segments(store)
    assert 0 < kept <= NUM_FACTS
    assert run("store", "verify", str(store)).returncode == 0
    report = tmp_path / "report.json"
    resumed = run(*encode_args(model, store, source, "--json", str(report)))
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(report.read_text())["encoded"] == NUM_FACTS - kept
    assert num_segments(store) == NUM_FACTS
    assert run("store", "verify", str(store)).returncode == 0


def test_errors_name_the_object_and_write_nothing(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"kind": "fact", "user": "u", "id": "1", "text": "a"}\n{"kind": "fact"\n')
    result = run(*encode_args(model, store, broken))
    assert result.returncode == 2
    assert "broken.jsonl:2" in result.stderr
    assert not store.exists()

    long = tmp_path / "long.jsonl"
    line = {"kind": "fact", "user": "u", "id": "long-one", "text": "word " * 300}
    long.write_text(json.dumps(line) + "\n")
    result = run(*encode_args(model, store, long, "--max-model-len", "128"))
    assert result.returncode == 2
    assert "long-one" in result.stderr
    assert "word word" not in result.stderr
    assert num_segments(store) == 0

    source = write_facts(tmp_path / "facts.jsonl", 1)
    (tmp_path / "file").write_text("")
    result = run(*encode_args(model, tmp_path / "file" / "store", source))
    assert result.returncode == 2
    assert "store" in result.stderr
    assert "Traceback" not in result.stderr
