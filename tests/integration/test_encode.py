"""``inferscale encode`` as a command: killed and resumed, and its errors."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from tests.integration.commands import ENVIRONMENT, command, run_cli, sample_facts

from inferscale_runtime.store.store import Store

pytestmark = pytest.mark.vllm

NUM_FACTS = 70  # more than one commit of the job


def encode_args(model: Path, store: Path, source: Path, *more: str) -> list[str]:
    arguments = ["encode", "--input", str(source), "--model", str(model), "--store", str(store)]
    return [*arguments, "--dtype", "float32", "--policy", "none", *more]


def write_facts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps(fact) + "\n" for fact in sample_facts(count)))
    return path


def num_segments(store: Path) -> int:
    if not (store / "inferscale-store.json").exists():
        return 0
    return sum(sum(user.segments.values()) for user in Store.open(str(store)).user_stats())


def test_killed_job_goes_on_where_it_was(smollm2: Path, tmp_path: Path) -> None:
    source = write_facts(tmp_path / "facts.jsonl", NUM_FACTS)
    store = tmp_path / "store"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command(*encode_args(smollm2, store, source)),
            stdout=log,
            stderr=log,
            env=ENVIRONMENT,
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
    assert run_cli("store", "verify", str(store)).returncode == 0
    report = tmp_path / "report.json"
    resumed = run_cli(*encode_args(smollm2, store, source, "--json", str(report)))
    assert resumed.returncode == 0, resumed.stderr
    body = json.loads(report.read_text())
    assert body["encoded"] == NUM_FACTS - kept
    opened = Store.open(str(store))
    assert body["fingerprint"] in opened.fingerprints()
    assert body["store_bytes"] == opened.total_bytes() > 0
    assert (body["users"], body["facts"], body["removed"], body["shard"]) == (
        1, NUM_FACTS, 0, "0/1",
    )  # fmt: skip
    # A log of whole lines, whatever the libraries draw on a terminal.
    assert "\r" not in resumed.stderr
    assert num_segments(store) == NUM_FACTS

    # Two facts are gone from the input and one is too old. That needs no engine: with one byte of
    # KV cache none could start.
    lines = sample_facts(NUM_FACTS)[:-2]
    lines[0]["time"] = "2001-02-03"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"retention": {"max_age_days": 30}}))
    more = ("--config", str(config), "--json", str(report), "--kv-cache-bytes", "1")
    fewer = run_cli(*encode_args(smollm2, store, source, *more))
    assert fewer.returncode == 0, fewer.stderr
    body = json.loads(report.read_text())
    assert (body["encoded"], body["removed"], body["expired"]) == (0, 3, 1)
    assert num_segments(store) == NUM_FACTS - 3
    assert run_cli("store", "verify", str(store)).returncode == 0


def test_sigterm_keeps_what_was_read(smollm2: Path, tmp_path: Path, unused_port: int) -> None:
    """With the built-in model, whose folder is made already, and the status port."""
    cache = tmp_path / "models"
    cache.mkdir()
    (cache / "smollm2-135m").symlink_to(smollm2)
    source = write_facts(tmp_path / "facts.jsonl", NUM_FACTS)
    store = tmp_path / "store"
    arguments = encode_args(Path("builtin:smollm2-135m"), store, source)
    arguments += ["--status-port", str(unused_port), "--status-host", "127.0.0.1"]
    url = f"http://127.0.0.1:{unused_port}/inferscale/v1/status"
    states = []
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command(*arguments),
            stdout=log,
            stderr=log,
            env={**ENVIRONMENT, "INFERSCALE_MODEL_CACHE": str(cache)},
        )
        try:
            deadline = time.monotonic() + 240
            seen = {"encoded": 0}
            while seen["encoded"] < 3:
                assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
                assert time.monotonic() < deadline
                try:
                    seen = httpx.get(url).json()
                except httpx.TransportError:
                    continue  # the process has only just begun
                states.append(seen["state"])
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
        finally:
            process.kill()
            process.wait()
    assert states[0] in ("loading", "reading_input")
    assert states[-1] == "encoding"
    assert (seen["facts"], seen["users"]) == (NUM_FACTS, 1)
    assert seen["encoded"] <= num_segments(store) < NUM_FACTS
    assert run_cli("store", "verify", str(store)).returncode == 0
    assert "stopped by SIGTERM" in (tmp_path / "log").read_text().splitlines()[-1]


def test_errors_name_the_object_and_write_nothing(smollm2: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"kind": "fact", "user": "u", "id": "1", "text": "a"}\n{"kind": "fact"\n')
    result = run_cli(*encode_args(smollm2, store, broken))
    assert result.returncode == 2
    assert "broken.jsonl:2" in result.stderr
    assert not store.exists()

    long = tmp_path / "long.jsonl"
    line = {"kind": "fact", "user": "u", "id": "long-one", "text": "word " * 300}
    long.write_text(json.dumps(line) + "\n")
    result = run_cli(*encode_args(smollm2, store, long, "--max-model-len", "128"))
    assert result.returncode == 2
    assert "long-one" in result.stderr
    assert "word word" not in result.stderr
    assert num_segments(store) == 0
    assert list(Store.open(str(store)).users()) == [], "not even the facts before it"

    source = write_facts(tmp_path / "facts.jsonl", 1)
    (tmp_path / "file").write_text("")
    result = run_cli(*encode_args(smollm2, tmp_path / "file" / "store", source))
    assert result.returncode == 1, "a store that cannot be written is no fault of the input"
    assert "store" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("inferscale: error: ")

    limited = tmp_path / "config.json"
    limited.write_text(json.dumps({"quota": {"max_store_bytes": 1000}}))
    result = run_cli(*encode_args(smollm2, tmp_path / "small", source, "--config", str(limited)))
    assert result.returncode == 2
    assert "quota.max_store_bytes is 1000" in result.stderr.splitlines()[-1]
    assert num_segments(tmp_path / "small") == 0
