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


def test_quality(smollm2: Path, workdir: Path) -> None:
    """``all`` in the stored order is exact, another order is not, and the text side is right."""
    data, file = workdir / "locomo.json", workdir / "quality.json"
    conversation = locomo_conversation()
    data.write_text(json.dumps([conversation]))
    arguments = ["bench", "quality", "--model", str(smollm2), "--data", str(data)]
    arguments += ["--workdir", str(workdir / "quality"), "--settings", "all+stored,all"]
    arguments += ["--k", "6", "--users", "1", "--questions", "2", "--max-model-len", "1024"]
    arguments += ["--dram-bytes", str(1 << 26), "--kv-cache-bytes", str(1 << 27)]
    # Answers are generated with a claim of their own; an injection that is not used is an error.
    arguments += ["--generate", "8"]
    done = run_cli(*arguments, "--json", str(file))
    assert done.returncode == 0, done.stderr[-3000:]
    exact, other = (row for row in check_document(file, "quality") if row["category"] == "all")
    assert (exact["setting"], other["setting"]) == ("all+stored", "all")
    assert exact["questions"] == 2
    assert abs(exact["worse_nats"]) < 1e-3
    assert exact["kl"] < 1e-4
    assert exact["top1"] == 1
    assert exact["injected_f1"] == exact["text_f1"] > 0
    assert other["kl"] > 1e-3, "facts read behind others than those before them are not exact"
    assert exact["recall"] == 1
    assert exact["text_nats"] == pytest.approx(oracle_nats(smollm2, conversation), abs=1e-3)


def locomo_conversation() -> dict[str, Any]:
    """Written for this test in LoCoMo's shape."""
    lines = (
        "Ann moved to Bergen in March",
        "Ann plays the cello in an orchestra",
        "Ben has a red canoe",
        "Ben works as a baker at night",
        "Ann is afraid of large dogs",
        "Ben learns Greek with his sister",
    )
    turns = [
        {"speaker": text[:3], "dia_id": f"D1:{n}", "text": text} for n, text in enumerate(lines, 1)
    ]
    return {
        "sample_id": "c1",
        "qa": [
            {"question": q, "answer": a, "evidence": [f"D1:{n}"], "category": 4}
            for q, a, n in (
                ("Where did Ann move to?", "Bergen", 1),
                ("What does Ben work as?", "He is a baker", 4),
            )
        ],
        "conversation": {"session_1_date_time": "1 May 2023", "session_1": turns},
        "observation": {
            "session_1_observation": {
                "Ann": [[f"{text}.", f"D1:{n}"] for n, text in enumerate(lines, 1)]
            }
        },
    }


def oracle_nats(model: Path, conversation: dict[str, Any]) -> float:
    """Mean log-likelihood of the gold answers after the text prompt, by transformers."""
    import torch
    import transformers as hf

    from inferscale_runtime.config import DEFAULT_FOOTER, DEFAULT_HEADING

    tokenizer = hf.AutoTokenizer.from_pretrained(model)
    oracle = hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    facts = [text for text, _ in conversation["observation"]["session_1_observation"]["Ann"]]
    found = []
    for entry in conversation["qa"]:
        memory = "".join(f"- {text} (1 May 2023)\n" for text in facts)
        messages = [
            {"role": "system", "content": DEFAULT_HEADING + memory + DEFAULT_FOOTER},
            {"role": "user", "content": entry["question"]},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # Each fact is tokenised alone, as are preamble, rest and answer.
        start, end = text.index(memory), text.index(memory) + len(memory)
        parts = [text[:start], *(f"{line}\n" for line in memory.splitlines()), text[end:]]
        prompt = [t for part in parts for t in tokenizer.encode(part, add_special_tokens=False)]
        gold = tokenizer.encode(entry["answer"], add_special_tokens=False)
        gold.append(tokenizer.eos_token_id)
        with torch.no_grad():
            logits = oracle(torch.tensor([[*prompt, *gold]])).logits[0, -len(gold) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        found.append(float(logprobs[range(len(gold)), gold].mean()))
    return sum(found) / len(found)


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
