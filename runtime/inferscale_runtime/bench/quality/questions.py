"""LoCoMo's questions with their gold answers and evidence (pure)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferscale_runtime.encode.locomo import convert
from inferscale_runtime.errors import ConfigError

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop"}
"""Categories that have an answer; those of category 5 have none."""

_TURN = re.compile(r"D\d+:\d+")


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a conversation.

    Attributes:
        user: The conversation.
        text: The question.
        gold: Its answer.
        category: A key of ``CATEGORIES``.
        evidence: Turns that hold the answer; may be empty.
    """

    user: str
    text: str
    gold: str
    category: int
    evidence: frozenset[str]


@dataclass(frozen=True, slots=True)
class Conversations:
    """What is asked and what is remembered.

    Attributes:
        lines: Input lines of ``inferscale encode``, by user.
        questions: In random order, by user.
        sources: Turns that each fact came from, by user and fact id.
    """

    lines: dict[str, list[dict[str, str]]]
    questions: dict[str, list[Question]]
    sources: dict[str, dict[str, frozenset[str]]]


def load_conversations(file: Path, users: int, questions: int, seed: int) -> Conversations:
    """Reads the first conversations of a LoCoMo file.

    Args:
        file: ``locomo10.json``.
        users: How many conversations.
        questions: Most questions of each, drawn at random.
        seed: Same seed, same questions.

    Raises:
        InputError: The file cannot be read or is not LoCoMo.
        ConfigError: It has fewer conversations.
    """
    lines: dict[str, list[dict[str, str]]] = {}
    for line in convert(str(file)):
        lines.setdefault(line["user"], []).append(line)
    document = {c["sample_id"]: c for c in json.loads(file.read_text(encoding="utf-8"))}
    chosen = [user for user in lines if _questions(document[user])][:users]
    if len(chosen) < users:
        raise ConfigError(f"--users {users}: '{file}' has {len(chosen)} conversations")
    asked = {}
    for user in chosen:
        found = _questions(document[user])
        random.Random(f"{seed}/{user}").shuffle(found)
        asked[user] = found[:questions]
    return Conversations(
        {user: lines[user] for user in chosen},
        asked,
        {user: fact_sources(document[user]) for user in chosen},
    )


def _questions(conversation: Mapping[str, Any]) -> list[Question]:
    return [
        Question(
            str(conversation["sample_id"]),
            str(entry["question"]),
            str(entry["answer"]),
            int(entry["category"]),
            frozenset(_TURN.findall(" ".join(map(str, entry.get("evidence") or ())))),
        )
        for entry in conversation["qa"]
        if entry.get("category") in CATEGORIES and "answer" in entry
    ]


def fact_sources(conversation: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """All turns that each fact names; fact ids are those of ``inferscale locomo``."""
    result = {}
    for name, session in conversation["observation"].items():
        number = name.removeprefix("session_").removesuffix("_observation")
        entries = [entry for speaker in session.values() for entry in speaker]
        for place, (_, source) in enumerate(entries, 1):
            result[f"S{number}:F{place}"] = frozenset(_TURN.findall(str(source)))
    return result


def evidence_recall(
    question: Question, fact_ids: Sequence[str], sources: Mapping[str, frozenset[str]]
) -> float | None:
    """Share of the evidence turns that the retrieved facts came from; None without evidence."""
    if not question.evidence:
        return None
    found = frozenset[str]().union(*(sources[fact_id] for fact_id in fact_ids))
    return len(question.evidence & found) / len(question.evidence)
