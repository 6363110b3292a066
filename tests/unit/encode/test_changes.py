"""What is encoded again, and what leaves injection, after a change of one user's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from inferscale_runtime.config import PromptConfig
from inferscale_runtime.encode.changes import EncodePlan, merge_memory, plan_encoding
from inferscale_runtime.encode.policies import parse_policy
from inferscale_runtime.prompt.template import Template
from inferscale_runtime.store.records import Fact, Segment, Turn, UserMemory, tombstone

TEMPLATE = Template(
    lambda messages, arguments: "",
    lambda text: [ord(char) for char in text],
    PromptConfig(fact_format="{text}\n"),
)
PREAMBLE = (1, 2, 3)
FACTS = tuple(Fact(f"f{n}", text, f"t{n}") for n, text in enumerate(("aa", "bb", "cc", "dd")))
TURNS = tuple(Turn(f"t{n}", "Ann", f"turn {n}") for n in range(4))
Encodings = Mapping[str, Mapping[str, Segment]]


def memory(facts: tuple[Fact, ...] = FACTS, encodings: Encodings | None = None) -> UserMemory:
    rows = np.eye(len(facts), 8, dtype=np.float32)
    return UserMemory("ann", 3, facts, TURNS, "mini", rows, encodings or {})


def plan(
    of: UserMemory, policy: str = "facts:1", fingerprint: str = "fp", max_tokens: int = 1000
) -> tuple[list[EncodePlan], list[Fact]]:
    return plan_encoding(of, TEMPLATE, PREAMBLE, parse_policy(policy), fingerprint, max_tokens)


def encoded(of: UserMemory, *policies: str) -> UserMemory:
    """Pretends that everything was encoded, under one fingerprint a policy."""
    tables = {}
    for policy in policies:
        plans, _ = plan(of, policy, policy)
        tables[policy] = {
            p.fact.id: Segment(
                p.fact.id, p.key, p.token_ids, p.context.fact_ids, p.context.turn_ids, "kv", 0, 0
            )
            for p in plans
        }
    return replace(of, encodings=tables)


def left(of: UserMemory) -> dict[str, set[str]]:
    return {name: set(table) for name, table in of.encodings.items()}


def merge(
    old: UserMemory,
    facts: tuple[Fact, ...] = FACTS,
    turns: tuple[Turn, ...] = TURNS,
    embedder: str = "mini",
) -> tuple[UserMemory, list[int]]:
    return merge_memory("ann", old, facts, turns, embedder)


ALL = {fact.id for fact in FACTS}


def test_a_new_user_needs_everything() -> None:
    new, todo = merge_memory("ann", None, FACTS, TURNS, "mini")
    assert (new.version, todo) == (0, [0, 1, 2, 3])
    plans, too_long = plan(new)
    assert [p.fact for p in plans] == list(FACTS)
    assert too_long == []
    assert plans[2].context.fact_ids == ("f1",)
    assert plans[2].prompt_ids == (*PREAMBLE, *map(ord, "bb\ncc\n"))
    assert plans[2].token_ids == tuple(map(ord, "cc\n"))


def test_the_same_input_needs_nothing() -> None:
    same, todo = merge(encoded(memory(), "facts:1"))
    assert todo == []
    assert plan(same, fingerprint="facts:1") == ([], [])
    assert np.array_equal(same.embeddings, memory().embeddings)


def test_a_new_fact_leaves_the_others_alone() -> None:
    policies = ("facts:1", "all", "neighbours:2")
    new, todo = merge(encoded(memory(), *policies), (*FACTS, Fact("f9", "zz")))
    assert left(new) == dict.fromkeys(policies, ALL)
    assert todo == [4]
    for policy in policies:
        assert [p.fact.id for p in plan(new, policy, policy)[0]] == ["f9"]
    assert np.array_equal(new.embeddings[:4], memory().embeddings)
    assert not new.embeddings[4].any()


def test_another_order_encodes_what_is_read_differently() -> None:
    policies = ("facts:1", "all", "neighbours:2", "none")
    new, todo = merge(encoded(memory(), *policies), (FACTS[1], FACTS[0], *FACTS[2:]))
    assert todo == []
    assert left(new) == dict.fromkeys(policies, ALL), "they stay in use until they are read again"
    again = {name: [p.fact.id for p in plan(new, name, name)[0]] for name in policies}
    assert again == {
        "facts:1": ["f1", "f0", "f2"],
        "all": ["f1", "f0", "f2", "f3"],
        "neighbours:2": [],
        "none": [],
    }


def test_a_changed_fact_takes_its_dependents_out_under_every_fingerprint() -> None:
    facts = (FACTS[0], replace(FACTS[1], text="xx"), *FACTS[2:])
    new, todo = merge(encoded(memory(), "facts:1", "all", "none"), facts)
    assert todo == [1]
    assert left(new) == {"facts:1": {"f0", "f3"}, "all": {"f0"}, "none": {"f0", "f2", "f3"}}
    assert [p.fact.id for p in plan(new, fingerprint="facts:1")[0]] == ["f1", "f2"]


def test_a_deleted_fact_goes_with_its_dependents() -> None:
    new, todo = merge(encoded(memory(), "facts:1"), FACTS[:1] + FACTS[2:])
    assert todo == []
    assert left(new) == {"facts:1": {"f0", "f3"}}
    assert [p.fact.id for p in plan(new, fingerprint="facts:1")[0]] == ["f2"]


def test_a_deleted_or_changed_turn_takes_its_readers_out() -> None:
    old = encoded(memory(), "turns:1", "none")
    changed = (TURNS[0], replace(TURNS[1], text="other"), *TURNS[2:])
    for turns in (TURNS[:1] + TURNS[2:], changed):
        new, _ = merge(old, turns=turns)
        assert left(new) == {"turns:1": {"f0", "f1", "f3"}, "none": ALL}


def test_another_embedder_makes_all_embeddings_new_and_keeps_the_segments() -> None:
    new, todo = merge(encoded(memory(), "facts:1"), embedder="other")
    assert todo == [0, 1, 2, 3]
    assert new.embedder == "other"
    assert left(new) == {"facts:1": ALL}


def test_a_changed_tokenisation_is_encoded_again() -> None:
    old = encoded(memory(), "none")
    table = dict(old.encodings["none"])
    table["f1"] = replace(table["f1"], token_ids=(7,))
    plans, _ = plan(replace(old, encodings={"none": table}), "none", "none")
    assert [p.fact.id for p in plans] == ["f1"]


def test_the_context_is_cut_at_its_front() -> None:
    # Preamble 3, each fact 3 tokens: room for one fact of context beside the fact itself.
    plans, too_long = plan(memory(), "all", max_tokens=9)
    assert [p.context.fact_ids for p in plans] == [(), ("f0",), ("f1",), ("f2",)]
    assert too_long == []
    assert max(len(p.prompt_ids) for p in plans) == 9
    assert [p.context.fact_ids for p in plan(memory(), "all", max_tokens=8)[0]] == [()] * 4


def test_a_fact_that_does_not_fit_is_reported_and_the_others_are_planned() -> None:
    facts = (*FACTS, Fact("long", "x" * 20))
    plans, too_long = plan(memory(facts), "none", max_tokens=10)
    assert [fact.id for fact in too_long] == ["long"]
    assert [p.fact.id for p in plans] == ["f0", "f1", "f2", "f3"]
    assert plan(memory(facts), "none", max_tokens=24)[1] == []


def test_users_with_the_same_facts_have_keys_of_their_own() -> None:
    for policy in ("none", "facts:2"):
        mine, _ = plan(memory(), policy)
        yours, _ = plan(replace(memory(), user="ben"), policy)
        assert not {p.key for p in mine} & {p.key for p in yours}
        assert [p.prompt_ids for p in mine] == [p.prompt_ids for p in yours]


def test_keys_depend_on_context_and_fingerprint() -> None:
    base = {p.key for p in plan(memory(), "facts:1")[0]}
    assert not base & {p.key for p in plan(memory(), "facts:1", "other")[0]}
    changed = (replace(FACTS[0], text="zz"), *FACTS[1:])
    again = {p.key for p in plan(memory(changed), "facts:1")[0]}
    assert len(base & again) == 2, "only the changed fact and the one read after it"


def test_a_tool_replaces_its_own_facts_and_leaves_the_others() -> None:
    facts = (*FACTS, Fact("z1", "from zep", origin="zep"), Fact("z2", "also", origin="zep"))
    old = memory(facts)
    zep = frozenset({"zep"})
    new, _ = merge_memory("ann", old, (facts[-1],), (), "mini", zep)
    assert {fact.id for fact in new.facts} == {*(fact.id for fact in FACTS), "z2"}
    assert new.turns == TURNS
    # What a person deleted does not come back from the tool it came from.
    stone = tombstone("fact", "zep", "ann", "z1")
    forgotten = replace(memory((*FACTS, facts[-1])), tombstones=frozenset({stone}))
    again, _ = merge_memory("ann", forgotten, facts[-2:], (), "mini", zep)
    assert {fact.id for fact in again.facts} == {*(fact.id for fact in FACTS), "z2"}
    assert again.tombstones == {stone}
    gone, todo = merge_memory("ann", new, (), (), "mini", zep)
    assert {fact.id for fact in gone.facts} == {fact.id for fact in FACTS}
    assert todo == []
