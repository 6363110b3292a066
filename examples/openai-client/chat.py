"""Chat with a memory, through the OpenAI Python client.

    pip install -r requirements.txt
    python chat.py --url http://127.0.0.1:8000 --user maya

Lines that begin with a slash change the memory:

    /facts            what is remembered
    /remember TEXT    one more fact; the very next answer knows it
    /forget ID        this fact is never used again
    /quit
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from typing import Any
from urllib.parse import quote

from openai import APIStatusError, OpenAI


class MemoryChat:
    """One chat of one user.

    Args:
        url: The server, for example ``http://127.0.0.1:8000``.
        user: Whose memory.
        key: API key of the server; any text where it asks for none.
        max_tokens: Longest answer.
    """

    def __init__(self, url: str, user: str, key: str, max_tokens: int = 200) -> None:
        # A router in front of several servers keeps a user at one of them by this header.
        headers = {"x-user-id": quote(user)}
        self.client = OpenAI(base_url=f"{url}/v1", api_key=key, default_headers=headers)
        self.model = self.client.models.list().data[0].id
        self.user = user
        self.max_tokens = max_tokens
        self.session = secrets.token_hex(8)
        self.messages: list[Any] = []
        self.facts_url = f"{url}/inferscale/v1/users/{quote(user, safe='')}/facts"

    def ask(self, question: str) -> tuple[str, dict[str, Any]]:
        """Asks with the whole conversation; gives the answer and what the memory did."""
        messages = [*self.messages, {"role": "user", "content": question}]
        answer = self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            max_tokens=self.max_tokens,
            # `memory` is no field of OpenAI's, so it travels in extra_body.
            extra_body={"memory": {"user": self.user, "session": self.session}},
        )
        text = answer.choices[0].message.content or ""
        self.messages = [*messages, {"role": "assistant", "content": text}]
        usage: dict[str, Any] = getattr(answer.usage, "memory", None) or {}
        return text, usage

    def facts(self) -> list[dict[str, Any]]:
        """All facts, page by page."""
        found: list[dict[str, Any]] = []
        after: str | None = None
        while True:
            query = {"limit": 100} | ({"after": after} if after else {})
            options = {"params": query}
            page: Any = self.client.get(self.facts_url, cast_to=object, options=options)
            found += page["facts"]
            after = page["next"]
            if not after:
                return found

    def remember(self, text: str) -> str:
        """Writes a fact and gives its id."""
        body = {"facts": [{"text": text}]}
        # The client tries again by itself; with this key a second try writes nothing twice.
        options = {"headers": {"Idempotency-Key": secrets.token_hex(16)}}
        written: Any = self.client.put(self.facts_url, cast_to=object, body=body, options=options)
        return str((written["created"] + written["updated"] + written["unchanged"])[0])

    def forget(self, fact_id: str) -> None:
        """Deletes a fact."""
        self.client.delete(f"{self.facts_url}/{quote(fact_id, safe='')}", cast_to=object)


def run(chat: MemoryChat, line: str) -> None:
    """Does what one line says."""
    command, _, rest = line.partition(" ")
    if command == "/facts":
        for fact in chat.facts():
            print(f"{fact['id']}: {fact['text']}")
    elif command == "/remember" and rest:
        print(f"remembered as {chat.remember(rest)}")
    elif command == "/forget" and rest:
        chat.forget(rest)
        print("forgotten")
    elif command.startswith("/"):
        print("commands: /facts, /remember TEXT, /forget ID, /quit")
    else:
        text, memory = chat.ask(line)
        print(text)
        print(f"[memory {memory.get('mode')}: {memory.get('facts')} facts, "
              f"{memory.get('injected_tokens')} tokens injected]")  # fmt: skip


def main() -> int:
    """Reads lines until the end of the input."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--user", required=True)
    parser.add_argument("--max-tokens", type=int, default=200, help="longest answer")
    arguments = parser.parse_args()
    # Not an argument: command lines are seen by every process of the machine.
    key = os.environ.get("INFERSCALE_API_KEY", "none")
    chat = MemoryChat(arguments.url, arguments.user, key, arguments.max_tokens)
    for line in sys.stdin:
        line = line.strip()
        if line == "/quit":
            break
        if not line:
            continue
        try:
            run(chat, line)
        except APIStatusError as error:
            print(f"the server refused: {error.message}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
