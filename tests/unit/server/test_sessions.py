"""Chats keep their facts in place, and never one that was deleted or corrected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_runtime.config import SessionConfig
from inferscale_runtime.prompt.notes import turn_keys
from inferscale_runtime.server.sessions import (
    Layout,
    Session,
    Sessions,
    continue_session,
    start_session,
)
from inferscale_runtime.store.records import Fact

FACTS = [Fact(f"f{n}", f"text {n}") for n in range(10)]
OWNER = ("main", "maya")
Message = dict[str, Any]


def chat(turns: int) -> list[Message]:
    messages: list[Message] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn}"})
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    return messages[:-1]


def turn(
    session: Session, number: int, best: list[int], facts: list[Fact] = FACTS, **limits: int
) -> Layout | None:
    keys = turn_keys(chat(number))
    return continue_session(session, 7, facts, keys, best, "relevance", SessionConfig(**limits))


def test_new_facts_join_the_question_that_brought_them() -> None:
    session = start_session(7, FACTS, [3, 1], 2)
    second = turn(session, 2, [5, 1, 4])
    assert second is not None
    assert (second.base, second.claimable, second.new_facts) == ((3, 1), 2, 2)
    # Before the second question, which is message 2; the best one stands last.
    assert second.notes == {2: (4, 5)}
    third = turn(second.session, 3, [4, 6])
    assert third is not None
    assert third.notes == {2: (4, 5), 4: (6,)}
    assert third.new_facts == 1


def test_the_same_question_again_adds_nothing() -> None:
    session = start_session(7, FACTS, [0], 1)
    first = turn(session, 2, [1, 2, 3, 4], new_facts=2)
    assert first is not None
    again = turn(first.session, 2, [1, 2, 3, 4], new_facts=2)
    assert again is not None
    assert (again.notes, again.new_facts) == (first.notes, 0)
    assert again.session == first.session
    # A fact that was written meanwhile goes behind what is there.
    written = turn(first.session, 2, [9, 1, 2], new_facts=2)
    assert written is not None
    assert written.notes == {2: (2, 1, 9)}


def test_another_branch_of_the_chat_has_not_its_notes() -> None:
    session = start_session(7, FACTS, [0], 1)
    second = turn(session, 2, [1])
    assert second is not None
    messages = chat(3)
    messages[0] = {"role": "user", "content": "something else"}
    other = continue_session(
        second.session, 7, FACTS, turn_keys(messages), [1], "stored", SessionConfig()
    )
    assert other is not None
    assert other.notes == {4: (1,)}


@pytest.mark.parametrize("place", ["base", "note"])
@pytest.mark.parametrize("change", ["deleted", "corrected"])
def test_a_lost_fact_ends_the_session(place: str, change: str) -> None:
    second = turn(start_session(7, FACTS, [0], 1), 2, [1])
    assert second is not None
    lost = 0 if place == "base" else 1
    facts = list(FACTS)
    if change == "deleted":
        del facts[lost]
    else:
        facts[lost] = replace(facts[lost], text="now different")
    assert turn(second.session, 3, [5], facts) is None
    # Facts that only moved are the same facts.
    moved = turn(second.session, 3, [], FACTS[::-1])
    assert moved is not None
    assert moved.base == (9,)


def test_another_epoch_ends_the_session() -> None:
    session = start_session(6, FACTS, [0], 1)
    assert turn(session, 2, [1]) is None


def test_a_session_with_too_many_facts_begins_anew() -> None:
    session = start_session(7, FACTS, [0, 1, 2], 3)
    assert turn(session, 2, [3, 4], max_facts=5) is not None
    assert turn(session, 2, [3, 4], max_facts=4) is None


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), min_size=1, max_size=8))
def test_no_turn_moves_what_stands(rounds: list[list[int]]) -> None:
    session = start_session(7, FACTS, rounds[0], len(rounds[0]))
    shown: dict[int, tuple[int, ...]] = {}
    for number, best in enumerate(rounds[1:], start=2):
        layout = turn(session, number, best)
        assert layout is not None
        assert {i: layout.notes.get(i) for i in shown} == shown
        placed = [*layout.base, *(n for found in layout.notes.values() for n in found)]
        assert len(placed) == len(set(placed))
        assert len(set(best[:5]) - set(placed)) == 0
        session, shown = layout.session, dict(layout.notes)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_sessions_end_by_time_and_number() -> None:
    clock, session = Clock(), Session(7, (), 0)
    limits = SessionConfig(max_sessions=3, max_sessions_per_user=2, ttl_seconds=10)
    held = Sessions(limits, clock)
    for name in "abc":
        held.put(OWNER, name, session)
    # One user's sessions push out that user's only.
    assert [held.get(OWNER, name) for name in "abc"] == [None, session, session]
    held.put(("main", "noah"), "a", session)
    held.put(OWNER, "b", session)
    held.put(("main", "zoe"), "a", session)
    assert held.get(OWNER, "c") is None
    assert len(held) == 3
    clock.now = 9.0
    held.put(OWNER, "b", session)
    clock.now = 10.0
    assert held.get(("main", "noah"), "a") is None
    assert held.get(OWNER, "b") is session
    assert len(held) == 1
    held.forget(OWNER)
    assert held.get(OWNER, "b") is None
    assert len(held) == 0


def test_sessions_are_apart() -> None:
    held = Sessions(SessionConfig())
    held.put(OWNER, "chat", Session(7, (), 1))
    assert held.get(("main", "noah"), "chat") is None
    assert held.get(("other", "maya"), "chat") is None
