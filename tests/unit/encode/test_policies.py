from __future__ import annotations

import numpy as np
import pytest

from inferscale_runtime.encode.policies import Context, parse_policy, policy_names
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.store.dependents import affected_by
from inferscale_runtime.store.records import Fact, Segment, Turn

TURNS = [Turn(f"t{i}", "Ann", "x") for i in range(5)]
SOURCES = ["t0", "t3", None, "t4"]
FACTS = [Fact(f"f{i}", "x", source) for i, source in enumerate(SOURCES)]
EMBEDDINGS = np.array([[1, 0], [0.6, 0.8], [1, 0], [0.8, 0.6]], np.float32)


@pytest.mark.parametrize(
    ("name", "index", "expected"),
    [
        ("none", 3, Context()),
        ("all", 0, Context()),
        ("all", 3, Context(("f0", "f1", "f2"))),
        ("facts:2", 3, Context(("f1", "f2"))),
        ("facts:9", 1, Context(("f0",))),
        ("turns:2", 1, Context((), ("t1", "t2"))),
        ("turns:9", 3, Context((), ("t0", "t1", "t2", "t3"))),
        ("turns:2", 0, Context()),
        ("turns:2", 2, Context()),
        # f0 and f2 are equal: each is the other's nearest, and a tie puts the lower index nearer.
        ("neighbours:1", 2, Context(("f0",))),
        ("neighbours:2", 0, Context(("f3", "f2"))),
        ("neighbours:3", 1, Context(("f2", "f0", "f3"))),
        ("neighbours:9", 1, Context(("f2", "f0", "f3"))),
        # The path is f0, f2 (equal), f3, f1; groups of two, with the group before them.
        ("chain:2", 0, Context()),
        ("chain:2", 2, Context(("f0",))),
        ("chain:2", 3, Context(("f0", "f2"))),
        ("chain:2", 1, Context(("f0", "f2", "f3"))),
        ("chain:1", 1, Context(("f3",))),
    ],
)
def test_context(name: str, index: int, expected: Context) -> None:
    policy = parse_policy(name)
    assert policy.name == name
    assert policy.needs_embeddings == name.startswith(("neighbours", "chain"))
    embeddings = EMBEDDINGS if policy.needs_embeddings else None
    assert policy.select(index, FACTS, TURNS, embeddings) == expected


def test_neighbours_exclude_the_fact_among_many_duplicates() -> None:
    facts = [Fact(f"f{i}", "x") for i in range(6)]
    context = parse_policy("neighbours:2").select(5, facts, [], np.ones((6, 1), np.float32))
    assert context == Context(("f1", "f0"))


def test_a_chain_follows_the_embeddings_that_it_is_given() -> None:
    policy = parse_policy("chain:2")
    facts = [Fact(f"f{i}", "x") for i in range(3)]
    line = np.array([[1, 0], [0.6, 0.8], [0.8, 0.6]], np.float32)
    assert policy.select(1, facts, [], line) == Context(("f0", "f2"))
    assert policy.select(1, facts, [], line[[0, 2, 1]].copy()) == Context(("f0",))


@pytest.mark.parametrize("name", ["neighbours:2", "chain:2"])
def test_without_embeddings_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match="embedder"):
        parse_policy(name).select(0, FACTS, TURNS, None)


@pytest.mark.parametrize(
    "name",
    ["", "turns", "turns:", "turns:0", "turns:-1", "turns:01", "turns:²", "facts:x", "none:1", "n"],
)
def test_unknown_name_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policy(name)
    assert all(valid in str(caught.value) for valid in policy_names())


def test_affected_by_finds_dependents_of_facts_and_turns() -> None:
    def segment(fact: str, facts: tuple[str, ...], turns: tuple[str, ...]) -> Segment:
        return Segment(fact, "00", (1,), facts, turns, "file", 0, 0)

    segments = {
        "a": segment("a", (), ("t1",)),
        "b": segment("b", ("a",), ()),
        "c": segment("c", ("b",), ("t2",)),
    }
    assert affected_by(["a"], [], segments) == {"b"}
    assert affected_by([], ["t1", "t2"], segments) == {"a", "c"}
    assert affected_by(["b"], ["t1"], segments) == {"a", "c"}
    assert affected_by([], [], segments) == frozenset()
