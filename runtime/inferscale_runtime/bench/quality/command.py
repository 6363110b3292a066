"""Runs ``inferscale bench quality``: encodes, scores what is not known yet, summarises."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from inferscale_runtime.bench.quality.answers import Judge, make_judge, token_f1
from inferscale_runtime.bench.quality.cache import Results, TextCache
from inferscale_runtime.bench.quality.engine import ScoringEngine, scoring_engine
from inferscale_runtime.bench.quality.memory import (
    Ask,
    Memory,
    open_memory,
    runtime_config,
    store_folder,
)
from inferscale_runtime.bench.quality.questions import (
    Conversations,
    Question,
    evidence_recall,
    load_conversations,
)
from inferscale_runtime.bench.quality.score import compare, mean_nats
from inferscale_runtime.bench.quality.settings import Setting, parse_settings
from inferscale_runtime.bench.quality.summary import summarise_categories
from inferscale_runtime.bench.report import Report, Row, versions
from inferscale_runtime.bench.server import say
from inferscale_runtime.children import encode
from inferscale_runtime.fingerprint import canonical_digest, model_digest
from inferscale_runtime.packing.shape import KVDtype
from inferscale_runtime.server.service import Prepared

COLUMNS = (
    ("k", "k"),
    ("setting", "setting"),
    ("kv_dtype", "KV"),
    ("category", "category"),
    ("questions", "questions"),
    ("text_nats", "text nats"),
    ("worse_nats", "injected worse by"),
    ("worse_nats_high", "at most"),
    ("kl", "KL"),
    ("top1", "top-1"),
    ("recovered", "recovered"),
    ("recall", "recall"),
    ("text_f1", "text F1"),
    ("injected_f1", "F1"),
    ("text_judged", "text judged"),
    ("injected_judged", "judged"),
    ("encode_tokens_per_fact", "encode tokens/fact"),
    ("store_megabytes", "store MB"),
    ("text_engine_p50_ms", "text ms"),
    ("engine_p50_ms", "ms"),
)
_PROGRESS_S = 30.0
_NOTHING_ENCODED: Row = {"encoded": 0, "computed_tokens": 0, "store_bytes": 0, "users": {}}


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        model: Model folder.
        dtype: vLLM dtype.
        kv_dtype: How stores keep KV.
        workdir: Stores, text distributions and results; a later run uses them again.
        settings: What is compared.
        ks: Facts to retrieve.
        seed: Of the drawn questions and the bootstrap.
        generate: Tokens of generated answers, 0 for none.
        judge: Judges generated answers, or None.
        timed: Questions that are timed for each setting and k, 0 for none.
        max_model_len: Longest prompt.
        dram_bytes: Size of the arena.
        kv_cache_bytes: Size of the engine's cache.
    """

    model: str
    dtype: str
    kv_dtype: KVDtype
    workdir: Path
    settings: Sequence[Setting]
    ks: Sequence[int]
    seed: int
    generate: int
    judge: Judge | None
    timed: int
    max_model_len: int
    dram_bytes: int
    kv_cache_bytes: int

    @property
    def policies(self) -> list[str]:
        """The policies of the settings, each once."""
        return list(dict.fromkeys(setting.policy for setting in self.settings))


def read_options(arguments: argparse.Namespace, model: str) -> Options:
    """Options of the command line.

    Raises:
        ConfigError: Naming the option.
    """
    judge = make_judge(arguments.judge, arguments.judge_model, arguments.judge_api_key_file)
    return Options(
        model=model,
        dtype=arguments.dtype,
        kv_dtype=arguments.kv_dtype,
        workdir=arguments.workdir,
        settings=parse_settings(arguments.settings),
        ks=arguments.k,
        seed=arguments.seed,
        generate=arguments.generate or (32 if judge else 0),
        judge=judge,
        timed=arguments.timed,
        max_model_len=arguments.max_model_len,
        dram_bytes=arguments.dram_bytes,
        kv_cache_bytes=arguments.kv_cache_bytes,
    )


def measure(arguments: argparse.Namespace, model: str, report: Report) -> None:
    """Measures and fills the report's rows: all questions first, then by category."""
    options = read_options(arguments, model)
    conversations = load_conversations(
        arguments.data, arguments.users, arguments.questions, options.seed
    )
    options.workdir.mkdir(parents=True, exist_ok=True)
    costs = {
        policy: encode_conversations(options, policy, conversations) for policy in options.policies
    }
    with tempfile.TemporaryDirectory(prefix="inferscale-bench-", dir="/dev/shm") as run_dir:
        config = runtime_config(
            options.policies,
            options.kv_dtype,
            options.workdir,
            Path(run_dir),
            options.dram_bytes,
        )
        with (
            scoring_engine(
                model, options.dtype, config, options.max_model_len, options.kv_cache_bytes
            ) as engine,
            open_memory(config, engine) as memory,
        ):
            scorer = Scorer(options, conversations, engine, memory)
            for setting, k in ((s, k) for s in options.settings for k in options.ks):
                values = scorer.run(setting, k)
                timed = scorer.time(setting, k) if options.timed else {}
                head = {"k": k, "setting": setting.name, "kv_dtype": options.kv_dtype}
                for row in summarise_categories(values, options.seed):
                    extra = {**costs[setting.policy], **timed} if row["category"] == "all" else {}
                    report.rows.append({**head, **row, **extra})
    report.rows.sort(key=lambda row: (row["category"] != "all", row["k"]))


def encode_conversations(options: Options, policy: str, conversations: Conversations) -> Row:
    """Encodes the conversations with a policy; facts that are in the store are not read again.

    Returns:
        What it cost: tokens that went through the model for each fact, and the store's size.
    """
    folder = store_folder(options.workdir, policy, options.kv_dtype)
    folder.mkdir(exist_ok=True)
    facts, report, cost = folder / "facts.jsonl", folder / "report.json", folder / "cost.json"
    known = json.loads(cost.read_text()) if cost.exists() else _NOTHING_ENCODED
    wanted = {user: canonical_digest(lines) for user, lines in conversations.lines.items()}
    if wanted.items() - known["users"].items():
        say(f"encoding with {policy}")
        lines = [line for user in conversations.lines.values() for line in user]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        facts.write_text(text, encoding="utf-8")
        given = ["--input", str(facts), "--model", options.model]
        given += ["--store", str(folder / "store"), "--dtype", options.dtype]
        given += ["--policy", policy, "--kv-dtype", options.kv_dtype, "--json", str(report)]
        given += ["--max-model-len", str(options.max_model_len)]
        given += ["--kv-cache-bytes", str(options.kv_cache_bytes)]
        encode(given)
        found = json.loads(report.read_text())
        known = {
            "encoded": known["encoded"] + found["encoded"],
            "computed_tokens": known["computed_tokens"] + found["computed_tokens"],
            "store_bytes": found["store_bytes"],
            "users": {**known["users"], **wanted},
        }
        cost.write_text(json.dumps(known))
    return {
        "encode_tokens_per_fact": round(known["computed_tokens"] / max(1, known["encoded"]), 1),
        "store_megabytes": round(known["store_bytes"] / 1e6, 1),
    }


class Scorer:
    """Scores questions, one after the other.

    Args:
        options: What is measured.
        conversations: What is asked.
        engine: The running engine.
        memory: The stores beside it.
    """

    def __init__(
        self,
        options: Options,
        conversations: Conversations,
        engine: ScoringEngine,
        memory: Memory,
    ) -> None:
        self._options = options
        self._conversations = conversations
        self._engine = engine
        self._memory = memory
        self._end: int | None = engine.tokenizer.eos_token_id
        identity = [model_digest(options.model), options.dtype, versions()["vllm"]]
        self._identity = canonical_digest(identity)
        self._text = TextCache(options.workdir / "text", self._identity)
        self._results = Results(options.workdir / "results.jsonl")

    def run(self, setting: Setting, k: int) -> list[Row]:
        """Values of all questions; those that are known are not measured again."""
        values, shown = [], time.monotonic()
        questions = [q for asked in self._conversations.questions.values() for q in asked]
        for number, question in enumerate(questions):
            if time.monotonic() - shown > _PROGRESS_S:
                shown = time.monotonic()
                say(f"{setting.name}, k={k}: {number} of {len(questions)} questions")
            values.append(self._question(question, setting, k))
        say(f"{setting.name}, k={k}: {len(questions)} questions scored")
        return values

    def _key(self, question: Question, setting: Setting, k: int) -> str:
        judge = self._options.judge
        return canonical_digest(
            [
                self._identity,
                self._memory.fingerprint(setting.policy),
                # The policy chooses among all facts of the user.
                canonical_digest(self._conversations.lines[question.user]),
                [question.user, question.text, question.gold, k, setting.link_tail, setting.order],
                [self._options.generate, f"{judge.model}@{judge.url}" if judge else ""],
            ]
        )

    def _question(self, question: Question, setting: Setting, k: int) -> Row:
        key = self._key(question, setting, k)
        values = self._results.get(key)
        if values is None:
            values = self._measure(question, setting, k)
            self._results.put(key, values)
        return {**values, "category": question.category}

    def _measure(self, question: Question, setting: Setting, k: int) -> Row:
        ask = Ask(question.user, question.text, k)
        gold_ids = self._memory.answer_ids(question.gold, setting.policy, self._end)
        gold = torch.tensor(gold_ids)
        sources = self._conversations.sources[question.user]
        retrieved = self._memory.retrieved(ask, setting.policy)
        with self._memory.prompt(ask, setting, "injected") as prepared:
            prompt = prepared.token_ids or []
            claimed = prepared.usage.injected_tokens
            injected = self._engine.score(
                [*prompt, *gold_ids],
                len(gold_ids),
                claimed=claimed,
                salt=prepared.salt,
                params=prepared.params,
            )
        text = self._plain(prompt, gold_ids)
        none = self._plain(self._memory.prompt_without_facts(ask, setting.policy), gold_ids)
        texts: dict[str, str] = {}
        if self._options.generate:
            with self._memory.prompt(ask, setting, "injected") as again:
                texts["injected"] = self._generate(again, self._options.generate)
            texts["text"] = self._engine.generate(prompt, self._options.generate)
        return {
            **asdict(compare(text, injected, gold)),
            "none_nats": mean_nats(none, gold),
            "recall": evidence_recall(question, retrieved, sources),
            "gold_tokens": len(gold_ids),
            "prompt_tokens": len(prompt),
            "claimed_tokens": claimed,
            **self._graded(question, texts),
        }

    def _generate(self, prepared: Prepared, max_tokens: int) -> str:
        return self._engine.generate(
            prepared.token_ids or [],
            max_tokens,
            claimed=prepared.usage.injected_tokens,
            salt=prepared.salt,
            params=prepared.params,
        )

    def _plain(self, prompt: list[int], gold_ids: list[int]) -> torch.Tensor:
        ids = [*prompt, *gold_ids]
        count = len(gold_ids)
        return self._text.get(ids, count, lambda: self._engine.score(ids, count))

    def _graded(self, question: Question, texts: dict[str, str]) -> Row:
        judge = self._options.judge
        row: Row = {}
        for side, answer in texts.items():
            row[f"{side}_answer"] = answer
            row[f"{side}_f1"] = token_f1(answer, question.gold)
            if judge is not None:
                row[f"{side}_judged"] = float(judge.right(question.text, question.gold, answer))
        return row

    def time(self, setting: Setting, k: int) -> Row:
        """Milliseconds from planning to the first token; without HTTP, all facts in memory."""
        times: dict[str, list[float]] = {"text_engine": [], "engine": []}
        for ask in self._timed_asks(k):
            for name, mode in (("engine", "injected"), ("text_engine", "text")):
                with self._memory.prompt(ask, setting, mode, submitted=False):
                    pass  # brings the facts into the arena
                started = time.perf_counter()
                with self._memory.prompt(ask, setting, mode) as prepared:
                    self._generate(prepared, 1)
                times[name].append((time.perf_counter() - started) * 1e3)
        return {f"{name}_p50_ms": round(statistics.median(t), 1) for name, t in times.items()}

    def _timed_asks(self, k: int) -> Iterator[Ask]:
        questions = [
            q for asked in zip(*self._conversations.questions.values(), strict=False) for q in asked
        ]
        for question in questions[: self._options.timed]:
            yield Ask(question.user, question.text, k)
