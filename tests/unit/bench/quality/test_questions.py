from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferscale_runtime.bench.quality.questions import (
    evidence_recall,
    fact_sources,
    load_conversations,
)
from inferscale_runtime.encode.locomo import convert
from inferscale_runtime.errors import ConfigError


def conversation(name: str, questions: int = 3) -> dict[str, Any]:
    """Written for this test in LoCoMo's shape."""
    turns = [{"speaker": "Ann", "dia_id": f"D2:{n}", "text": f"Line {n}."} for n in range(1, 5)]
    asked: list[dict[str, Any]] = [
        {"question": f"Q{n}?", "answer": n, "evidence": ["D2:1; D2:3", "D"], "category": 1 + n % 4}
        for n in range(questions)
    ]
    asked.append({"question": "Trick?", "adversarial_answer": "no", "category": 5})
    return {
        "sample_id": name,
        "qa": asked,
        "conversation": {"session_2_date_time": "noon", "session_2": turns},
        "observation": {
            "session_2_observation": {
                "Ann": [["Ann talks.", ["D2:4", "D2:1"]], ["Ann sings.", "D2:2, D2:3"]],
                "Ben": [["Ben hears.", "D2:4"]],
            }
        },
    }


def write(folder: Path, *conversations: dict[str, Any]) -> Path:
    file = folder / "locomo.json"
    file.write_text(json.dumps(conversations))
    return file


def test_questions_with_an_answer_of_the_first_conversations(tmp_path: Path) -> None:
    file = write(tmp_path, conversation("a"), conversation("empty", 0), conversation("b", 9))
    found = load_conversations(file, users=2, questions=5, seed=1)
    assert list(found.lines) == list(found.questions) == ["a", "b"]
    assert sorted(q.text for q in found.questions["a"]) == ["Q0?", "Q1?", "Q2?"]
    assert len(found.questions["b"]) == 5
    assert found.questions["a"][0].evidence == {"D2:1", "D2:3"}
    assert {q.gold for q in found.questions["a"]} == {"0", "1", "2"}
    again = load_conversations(file, users=2, questions=5, seed=1)
    assert again == found
    assert load_conversations(file, users=2, questions=5, seed=2).questions != found.questions


def test_more_questions_begin_with_the_same_ones(tmp_path: Path) -> None:
    file = write(tmp_path, conversation("a", 9))
    few = load_conversations(file, users=1, questions=3, seed=0).questions["a"]
    assert load_conversations(file, users=1, questions=8, seed=0).questions["a"][:3] == few


def test_too_few_conversations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 1 conversations"):
        load_conversations(write(tmp_path, conversation("a")), users=2, questions=1, seed=0)


def test_fact_ids_and_sources_are_those_of_the_conversion(tmp_path: Path) -> None:
    """The ids are made in two places; the first source turn must agree for every fact."""
    document = conversation("a")
    sources = fact_sources(document)
    facts = [x for x in convert(str(write(tmp_path, document))) if x["kind"] == "fact"]
    assert sources.keys() == {fact["id"] for fact in facts}
    assert all(fact["turn"] in sources[fact["id"]] for fact in facts)
    assert sources["S2:F2"] == {"D2:2", "D2:3"}


def test_evidence_recall(tmp_path: Path) -> None:
    found = load_conversations(write(tmp_path, conversation("a")), users=1, questions=1, seed=0)
    (question,) = found.questions["a"]
    sources = found.sources["a"]
    assert evidence_recall(question, ["S2:F3"], sources) == 0
    assert evidence_recall(question, ["S2:F1"], sources) == 0.5
    assert evidence_recall(question, ["S2:F1", "S2:F2"], sources) == 1
