"""Generated answers against gold ones: token F1, and a judge behind an OpenAI-compatible API."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx

from inferscale_runtime.bench.report import BenchError
from inferscale_runtime.errors import ConfigError

_ARTICLES = re.compile(r"\b(a|an|the|and)\b")
_NO_WORD = re.compile(r"[^\w\s]")
_TIMEOUT_S = 120.0
_INSTRUCTION = (
    "You grade answers to questions about somebody's memories. Given a question, the correct "
    "answer and a given answer, reply with one word: CORRECT if the given answer says the same as "
    "the correct one, also in other words or with more detail, else WRONG."
)


def words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", _NO_WORD.sub(" ", text.lower())).split()


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the words; 0..1."""
    given, wanted = words(answer), words(gold)
    common = (Counter(given) & Counter(wanted)).total()
    if not common:
        return float(not given and not wanted)
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


@dataclass(frozen=True, slots=True)
class Judge:
    """A chat model that says whether an answer is right.

    Attributes:
        url: Base URL up to and without ``/chat/completions``.
        model: Its name there.
        api_key: Bearer token, or None.
    """

    url: str
    model: str
    api_key: str | None = None

    def right(self, question: str, gold: str, answer: str) -> bool:
        """Whether the judge accepts an answer.

        Raises:
            BenchError: It cannot be asked or says something else.
        """
        text = f"Question: {question}\nCorrect answer: {gold}\nGiven answer: {answer}"
        body = {
            "model": self.model,
            "temperature": 0,
            "max_tokens": 8,
            "messages": [
                {"role": "system", "content": _INSTRUCTION},
                {"role": "user", "content": text},
            ],
        }
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            response = httpx.post(
                f"{self.url}/chat/completions", json=body, headers=headers, timeout=_TIMEOUT_S
            )
            response.raise_for_status()
            said = str(response.json()["choices"][0]["message"]["content"]).strip().upper()
        except httpx.HTTPStatusError as error:
            raise BenchError(f"judge {self.url}: HTTP {error.response.status_code}") from None
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise BenchError(f"judge {self.url} gave no answer: {type(error).__name__}") from None
        if said.startswith("CORRECT") == said.startswith("WRONG"):
            raise BenchError(f"judge {self.url}: it answers neither CORRECT nor WRONG")
        return said.startswith("CORRECT")


def make_judge(url: str | None, model: str | None, key_file: Path | None) -> Judge | None:
    """The judge of the command line, or None.

    Raises:
        ConfigError: The options do not belong together, or the key cannot be read.
    """
    if url is None:
        if model or key_file:
            raise ConfigError("--judge-model and --judge-api-key-file need --judge URL")
        return None
    if model is None:
        raise ConfigError("--judge: name the model with --judge-model")
    key = None
    if key_file is not None:
        try:
            key = key_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"--judge-api-key-file '{key_file}': {error.strerror}") from None
    return Judge(url.rstrip("/"), model, key)
