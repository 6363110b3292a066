"""What does not fit the input format is mended, the same way every time."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from inferscale_runtime.encode.input import parse_lines
from inferscale_runtime.importing.folder import encode_lines
from inferscale_runtime.importing.records import (
    MAX_FACT_CHARS,
    Difference,
    ToolFact,
    ToolMemory,
    ToolTurn,
    clean,
    difference,
    from_lines,
    to_lines,
    user_problem,
)

SHORT = st.text(max_size=20)
TEXTS = SHORT | st.builds(lambda word, times: word * times, SHORT, st.integers(1, 1000))
FACTS = st.builds(
    ToolFact, st.sampled_from(["1", "2", "3"]), TEXTS, st.none() | SHORT, st.none() | st.just("t")
)
TURNS = st.builds(ToolTurn, st.sampled_from(["t", "u"]), SHORT, TEXTS, st.none() | SHORT)
MEMORIES = st.builds(
    ToolMemory, st.lists(FACTS, max_size=4).map(tuple), st.lists(TURNS, max_size=3).map(tuple)
)


@given(MEMORIES)
def test_whatever_a_tool_holds_becomes_input_that_the_encoder_takes(memory: ToolMemory) -> None:
    cleaned = clean(memory)
    data = encode_lines(to_lines("ann", "zep", cleaned))
    users = parse_lines(data.splitlines(keepends=True), "test")
    assert users["ann"].origins == {"zep"}
    assert [fact.text for fact in users["ann"].facts] == [fact.text for fact in cleaned.facts]
    assert clean(cleaned) == cleaned
    assert from_lines(json.loads(line) for line in data.decode().split("\n") if line) == cleaned


@given(st.lists(FACTS, max_size=3, unique_by=lambda fact: fact.id))
def test_no_word_of_a_fact_is_lost(facts: list[ToolFact]) -> None:
    kept = clean(ToolMemory(tuple(facts))).facts
    words = "".join(word for fact in facts for word in fact.text.split())
    # A word longer than a fact is cut; no other is.
    assert "".join(word for fact in kept for word in fact.text.split()) == (
        words.encode("utf-8", "replace").decode()
    )
    assert all(len(fact.text) <= MAX_FACT_CHARS for fact in kept)


def test_a_long_text_is_cut_at_spaces() -> None:
    text = "word " * 4000
    facts = clean(ToolMemory((ToolFact("a", text, "2026-01-01"),))).facts
    assert [fact.id for fact in facts] == ["a#1", "a#2", "a#3"]
    assert " ".join(fact.text for fact in facts) == text.strip()
    assert {fact.time for fact in facts} == {"2026-01-01"}


def test_an_unknown_turn_is_not_named() -> None:
    memory = ToolMemory((ToolFact("a", "x", None, "t"), ToolFact("b", "y", None, "u")),
                        (ToolTurn("t", "Ann", "hello"), ToolTurn("u", "Ann", "  ")))  # fmt: skip
    assert [fact.turn_id for fact in clean(memory).facts] == ["t", None]


def test_differences_are_by_id() -> None:
    old = ToolMemory((ToolFact("a", "x"), ToolFact("b", "y"), ToolFact("c", "z")))
    new = ToolMemory((ToolFact("b", "changed"), ToolFact("c", "z"), ToolFact("d", "new")))
    assert difference(old, new) == Difference(created=1, updated=1, deleted=1, unchanged=1)


def test_users_that_cannot_be_named() -> None:
    assert user_problem("ann@example.com/ü 🐕") is None
    assert user_problem(" ") == "empty id"
    assert user_problem("a\0b") == "NUL character in the id"
    assert user_problem("ü" * 257) == "id longer than 512 bytes"
