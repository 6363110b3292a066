"""The chat template rendered around the facts.

The template is rendered once with a sentinel where the facts go. What stands before the sentinel
must equal the preamble token for token, otherwise the request cannot be injected. Templates that
move a system message elsewhere in longer conversations (Mistral's) get the memory in the first user
message instead. Pure: the renderer and the tokenizer come in as functions.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from inferscale_runtime.config import PromptConfig
from inferscale_runtime.errors import UnsupportedModelError

Message = dict[str, Any]
Render = Callable[[list[Message], dict[str, Any]], str]
Tokenize = Callable[[str], list[int]]
Role = Literal["system", "user"]


@dataclass(frozen=True, slots=True)
class Preamble:
    """What stands before the first fact.

    Attributes:
        token_ids: Its tokens, template opening and BOS included.
        role: The message that carries the memory.
    """

    token_ids: tuple[int, ...]
    role: Role


@dataclass(frozen=True, slots=True)
class Template:
    """A model's chat template with a place for facts.

    Attributes:
        render: Renders messages and template arguments to text, generation prompt included.
        tokenize: Text to token ids without special tokens.
        prompt: Heading, fact format and footer.
    """

    render: Render
    tokenize: Tokenize
    prompt: PromptConfig

    def split(
        self, messages: Sequence[Message], role: Role, arguments: dict[str, Any]
    ) -> tuple[str, str] | None:
        """Renders a conversation and splits it where the facts go.

        Args:
            messages: The client's messages; contents are text.
            role: Which message carries the memory.
            arguments: Template arguments of the request (tools and the like).

        Returns:
            Text before and after the facts, or None if the template dropped or repeated the place.
        """
        # A fresh random mark per call: no client can write it into a message.
        mark = f"\u2063{secrets.token_hex(12)}\u2063"
        memory = self.prompt.heading + mark + self.prompt.footer
        before, found, after = self.render(
            insert_memory(messages, memory, role), arguments
        ).partition(mark)
        if not found or mark in after:
            return None
        return before, after

    def fact_token_ids(self, text: str) -> list[int]:
        """Tokens of one fact in the prompt's format, tokenised alone."""
        return self.tokenize(self.prompt.fact_format.replace("{text}", text))

    def preamble(self) -> Preamble:
        """Finds the preamble that single-turn and multi-turn conversations share.

        Raises:
            UnsupportedModelError: When the template has no stable opening.
        """
        ask: Message = {"role": "user", "content": "x"}
        longer: list[Message] = [ask, {"role": "assistant", "content": "y"}, ask]
        for role in ("system", "user"):
            try:
                short = self.split([ask], role, {})
                long = self.split(longer, role, {})
            except Exception:  # a template may raise for a role that it does not know
                continue
            if short and long and short[0] == long[0]:
                return Preamble(tuple(self.tokenize(short[0])), role)
        raise UnsupportedModelError(
            "chat template: neither a system message nor the first user message keeps a fixed "
            "opening; give the model a chat template that renders messages in order"
        )


def insert_memory(messages: Sequence[Message], memory: str, role: Role) -> list[Message]:
    """Puts the memory text in front of the system text or of the first user message.

    Args:
        messages: The client's messages.
        memory: Heading, facts and footer.
        role: Which message carries it.

    Returns:
        New messages; the input is not changed.
    """
    if role == "system":
        if messages and messages[0].get("role") in ("system", "developer"):
            first = dict(messages[0], content=memory + str(messages[0].get("content") or ""))
            return [first, *messages[1:]]
        return [{"role": "system", "content": memory}, *messages]
    result = [dict(message) for message in messages]
    # A system text would stand in front of the memory and move it: it goes behind instead.
    system = ""
    if result and result[0].get("role") in ("system", "developer"):
        system = str(result.pop(0).get("content") or "") + "\n\n"
    for message in result:
        if message.get("role") == "user":
            message["content"] = memory + system + str(message.get("content") or "")
            break
    return result
