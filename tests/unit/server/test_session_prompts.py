"""A chat's prompts: each begins with the one before, under the same salt."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from inferscale_runtime.server.options import MemoryOptions
from inferscale_runtime.server.service import MemoryService, Prepared

FACTS = ["aaaa", "bbbb", "cccc", "dddd", "eeee", "ffff"]
ENDING = "<assistant>"


class Chat:
    """A client that sends the whole conversation each time."""

    def __init__(self, service: MemoryService, **options: Any) -> None:
        self.service = service
        self.options = {"user": "maya", "session": "chat", "k": 2, **options}
        self.messages: list[dict[str, Any]] = []

    def say(self, question: str) -> Prepared:
        self.messages.append({"role": "user", "content": question})
        options = MemoryOptions(**self.options)
        arguments = {"add_generation_prompt": True}
        prepared = asyncio.run(self.service.prepare(options, self.messages, arguments, None))
        self.service.end(prepared)
        self.messages.append({"role": "assistant", "content": f"about {question}"})
        return prepared


def prompt(prepared: Prepared) -> str:
    assert prepared.token_ids is not None
    return "".join(map(chr, prepared.token_ids))


@pytest.fixture
def store(world: Any, kit: Any) -> Any:
    opened = world.store("main")
    kit.add_encoding(opened)
    kit.commit(opened, "maya", FACTS)
    kit.commit(opened, "noah", FACTS)
    return opened


@pytest.mark.parametrize("mode", ["injected", "text"])
def test_each_prompt_begins_with_the_one_before(world: Any, store: Any, mode: str) -> None:
    chat = Chat(world.service("main"), mode=mode)
    prepared = [chat.say(question) for question in ("ab", "cd", "ab", "fd")]
    for before, after in itertools.pairwise(prepared):
        assert prompt(after).startswith(prompt(before).removesuffix(ENDING))
        assert after.salt == before.salt
        assert after.usage.injected_tokens == before.usage.injected_tokens
    assert prompt(prepared[3]) == (
        prompt(prepared[0])
        + "about ab"
        + "<user>What else you know about the user:\n- dddd\n- cccc\n\ncd<assistant>about cd"
        + "<user>ab<assistant>about ab"
        + "<user>What else you know about the user:\n- ffff\n\nfd<assistant>"
    )
    usages = [p.usage for p in prepared]
    assert [u.session for u in usages] == ["started", *["continued"] * 3]
    assert [(u.facts, u.new_facts) for u in usages] == [(2, 0), (4, 2), (4, 0), (5, 1)]
    # Facts of 7 tokens, the heading not counted.
    injected = 0 if mode == "text" else 2 * 7
    assert [u.text_tokens for u in usages] == [n * 7 - injected for n in (2, 4, 4, 5)]


def test_both_modes_have_the_same_tokens(world: Any, store: Any) -> None:
    service = world.service("main")
    chats = [Chat(service, mode=mode, session=mode) for mode in ("injected", "text")]
    for question in ("ab", "cd", "fd"):
        injected, text = (chat.say(question) for chat in chats)
        assert injected.token_ids == text.token_ids
        assert (injected.usage.mode, text.usage.mode) == ("injected", "text")
        assert injected.salt != text.salt


def test_a_written_fact_joins_and_moves_nothing(world: Any, store: Any, kit: Any) -> None:
    chat = Chat(world.service("main"))
    first = chat.say("ab")
    kit.commit(store, "maya", [*FACTS, "zzzz"])
    second = chat.say("z")
    assert "- zzzz\n" in prompt(second)
    assert prompt(second).startswith(prompt(first).removesuffix(ENDING))
    assert second.salt == first.salt


@pytest.mark.parametrize("facts", [FACTS[1:], ["qqqq", *FACTS[1:]]], ids=["deleted", "corrected"])
def test_a_lost_fact_is_never_used_again(
    world: Any, store: Any, kit: Any, facts: list[str]
) -> None:
    chat = Chat(world.service("main"))
    assert "- aaaa\n" in prompt(chat.say("ab"))
    kit.commit(store, "maya", facts)
    prepared = chat.say("a")
    assert "- aaaa\n" not in prompt(prepared)
    assert prepared.usage.session == "restarted"
    assert chat.say("b").usage.session == "continued"


def test_another_user_has_another_session_of_the_same_name(world: Any, store: Any) -> None:
    service = world.service("main")
    Chat(service).say("ab")
    assert Chat(service, user="noah").say("cd").usage.session == "started"


def test_no_facts_asked_none_given(world: Any, store: Any) -> None:
    chat = Chat(world.service("main"))
    chat.say("ab")
    chat.options["k"] = 0
    assert chat.say("ab").usage.mode == "none"


def test_lost_state_is_a_fresh_start(world: Any, store: Any) -> None:
    chat = Chat(world.service("main"))
    chat.say("ab")
    chat.service = world.service("main")  # a server that was started again
    prepared = chat.say("cd")
    assert prepared.usage.session == "started"
    assert "- dddd\n- cccc\n" in prompt(prepared)


def test_a_session_that_begins_as_text_stays_so(world: Any, store: Any, kit: Any) -> None:
    kit.commit(store, "maya", FACTS, fingerprints=())
    chat = Chat(world.service("main"))
    first = chat.say("ab")
    assert (first.usage.mode, first.usage.reason) == ("text", "segment_missing")
    kit.commit(store, "maya", FACTS)
    second = chat.say("ba")
    # Its tokens are in the prefix cache, under the salt of text.
    assert (second.usage.mode, second.usage.reason) == ("text", "session")
    assert prompt(second).startswith(prompt(first).removesuffix(ENDING))
    assert second.salt == first.salt
