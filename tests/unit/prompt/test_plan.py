"""Prompt layout: what is claimed, and that both modes have the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from inferscale_runtime.config import PromptConfig
from inferscale_runtime.errors import UnsupportedModelError
from inferscale_runtime.prompt.plan import PlannedFact, order_facts, plan_prompt
from inferscale_runtime.prompt.template import Template, insert_memory

FACTS = [
    PlannedFact(0, (10, 11), "a"),
    PlannedFact(1, (20,), None),
    PlannedFact(2, (30, 31), "c"),
]


def test_text_and_injected_have_the_same_tokens() -> None:
    injected = plan_prompt([1, 2], FACTS, [9], link_tail=0, inject=True)
    text = plan_prompt([1, 2], FACTS, [9], link_tail=0, inject=False)
    assert injected.token_ids == text.token_ids == [1, 2, 10, 11, 30, 31, 20, 9]
    assert (injected.num_claimed, injected.keys, injected.num_text_tokens) == (6, ("a", "c"), 1)
    assert (text.num_claimed, text.keys, text.num_text_tokens) == (0, (), 5)


def test_link_tail_leaves_the_best_facts_unclaimed() -> None:
    plan = plan_prompt([1], FACTS, [9], link_tail=1, inject=True)
    assert plan.token_ids == [1, 10, 11, 20, 30, 31, 9]
    assert plan.num_claimed == 3
    assert plan_prompt([1], FACTS, [9], link_tail=9, inject=True).num_claimed == 1


def test_order() -> None:
    assert order_facts([4, 1, 3], "relevance") == [3, 1, 4]
    assert order_facts([4, 1, 3], "stored") == [1, 3, 4]


def in_order(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def system_last(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    system = "".join(m["content"] for m in messages if m["role"] == "system")
    rest = [m for m in messages if m["role"] != "system"]
    before = "".join(f"<{m['role']}>{m['content']}" for m in rest[:-1])
    return f"{before}<user>{system}{rest[-1]['content']}"


def no_memory(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    return "<fixed>"


def template(render: Any) -> Template:
    return Template(render, lambda text: [ord(char) for char in text], PromptConfig())


def test_role_of_the_memory() -> None:
    assert template(in_order).preamble().role == "system"
    assert template(system_last).preamble().role == "user"
    with pytest.raises(UnsupportedModelError, match="chat template"):
        template(no_memory).preamble()


def test_system_text_of_the_client_stands_behind_the_facts() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    halves = template(in_order).split(messages, "system", {})
    assert halves is not None
    assert "Be kind." not in halves[0]
    assert "Be kind." in halves[1]
    assert messages[0]["content"] == "Be kind."


def test_no_facts() -> None:
    plan = plan_prompt([1, 2], [], [9], link_tail=3, inject=True)
    assert (plan.token_ids, plan.num_claimed, plan.keys) == ([1, 2, 9], 2, ())
    assert (plan.num_facts, plan.num_text_tokens) == (0, 0)


def test_the_place_cannot_be_forged() -> None:
    seen: list[str] = []

    def watching(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        seen.append(in_order(messages, arguments))
        return seen[-1]

    own = template(watching)
    first = own.split([{"role": "user", "content": "Hi"}], "system", {})
    # A client that saw an earlier mark writes it into its message: the next one is another.
    again = own.split([{"role": "user", "content": seen[0]}], "system", {})
    assert first is not None
    assert again is not None
    assert first[0] == again[0]
    assert seen[0] in again[1]


def test_a_dropped_or_repeated_place_is_none() -> None:
    ask = [{"role": "user", "content": "Hi"}]
    assert template(no_memory).split(ask, "system", {}) is None
    twice = template(lambda messages, arguments: 2 * in_order(messages, arguments))
    assert twice.split(ask, "system", {}) is None


def test_a_conversation_without_a_user_has_no_place_in_it() -> None:
    assert template(in_order).split([{"role": "assistant", "content": "x"}], "user", {}) is None


@pytest.mark.parametrize("role", ["system", "user"])
@pytest.mark.parametrize("opening", ["system", "developer", None])
def test_insert_memory(role: Any, opening: str | None) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    if opening:
        messages.insert(0, {"role": opening, "content": "Be kind."})
    before = [dict(message) for message in messages]
    result = insert_memory(messages, "MEMORY ", role)
    assert messages == before
    assert result[0]["content"].startswith("MEMORY ")
    assert "".join(m["content"] for m in result).count("MEMORY ") == 1
    assert any("Be kind." in m["content"] for m in result) == bool(opening)
    assert result[-1]["content"].endswith("Hi")


def test_empty_contents() -> None:
    assert insert_memory([{"role": "system"}], "M", "system") == [
        {"role": "system", "content": "M"}
    ]
    assert insert_memory([{"role": "user", "content": None}], "M", "user") == [
        {"role": "user", "content": "M"}
    ]


def test_a_fact_with_braces_is_text() -> None:
    own = Template(in_order, lambda text: [ord(char) for char in text], PromptConfig())
    tokens = own.fact_token_ids("{text} {0}")
    assert "".join(map(chr, tokens)) == "- {text} {0}\n"


def test_a_fixed_order_never_moves() -> None:
    first = plan_prompt([1], FACTS, [9], link_tail=0, inject=True)
    assert (first.order, first.num_injectable) == ((0, 2, 1), 2)
    # The fact without KV has been encoded meanwhile; it stays where it is, and unclaimed.
    again = [FACTS[0], FACTS[2], PlannedFact(1, (20,), "b")]
    for inject in (True, False):
        plan = plan_prompt([1], again, [9, 8], link_tail=1, inject=inject, fixed=2)
        assert plan.token_ids == [*first.token_ids, 8]
        assert plan.keys == (("a", "c") if inject else ())
    # The first one has no KV any more: nothing behind it can be claimed.
    gone = [PlannedFact(0, (10, 11), None), *again[1:]]
    plan = plan_prompt([1], gone, [9], link_tail=0, inject=True, fixed=2)
    assert (plan.token_ids, plan.keys) == (first.token_ids, ())
