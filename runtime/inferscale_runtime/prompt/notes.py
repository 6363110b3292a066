"""Facts that a chat learnt later: notes in front of the questions that brought them (pure).

A new fact put among the first ones would move the whole conversation, and with it every block of
the prefix cache behind it. So it stands in the user's message that was the newest when the fact was
retrieved, and stays there in later turns: each prompt begins with the whole one before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from inferscale_runtime.prompt.template import Message


def turn_keys(messages: Sequence[Message]) -> list[tuple[int, str]]:
    """Names the places of a conversation where notes can stand.

    Args:
        messages: The client's messages, contents as text.

    Returns:
        For each user message its index and a digest of everything up to and with it: a place in a
        conversation that was changed before it is another place.
    """
    digest = hashlib.sha256()
    found = []
    for index, message in enumerate(messages):
        digest.update(json.dumps(message, sort_keys=True, default=str).encode() + b"\n")
        if message.get("role") == "user":
            found.append((index, digest.hexdigest()))
    return found


def write_note(heading: str, fact_format: str, texts: Sequence[str]) -> str:
    """The text of one note, an empty line at its end included.

    Args:
        heading: What stands before the facts.
        fact_format: How one fact is written; ``{text}`` is the fact.
        texts: The facts, in prompt order.
    """
    return heading + "".join(fact_format.replace("{text}", text) for text in texts) + "\n"


def insert_notes(messages: Sequence[Message], notes: Mapping[int, str]) -> list[Message]:
    """Puts notes in front of the contents of messages.

    Args:
        messages: The client's messages.
        notes: Message index -> note.

    Returns:
        New messages; the input is not changed.
    """
    return [
        dict(message, content=notes[index] + str(message.get("content") or ""))
        if index in notes
        else message
        for index, message in enumerate(messages)
    ]
