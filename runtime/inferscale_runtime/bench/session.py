"""``inferscale bench session``: time to first token over the turns of a chat.

The same chat is held four times, side by side: with a session and with fresh retrieval, each
injected and as text. Every chat has a user of its own with the same facts, because chats of one
user in one mode share the prefix cache. The answers are the model's own, of a fixed length, and go
back as the conversation's next messages.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inferscale_runtime.bench.client import Answer, Ask, ChatClient
from inferscale_runtime.bench.report import Row
from inferscale_runtime.bench.server import say
from inferscale_runtime.bench.stats import ratio
from inferscale_runtime.bench.workload import Workload

WAYS = (
    ("session", "injected"),
    ("fresh", "injected"),
    ("session_text", "text"),
    ("fresh_text", "text"),
)
COLUMNS = (
    ("turn", "turn"),
    ("prompt_tokens", "prompt tokens"),
    ("session_p50_ms", "session ms"),
    ("session_computed_tokens", "computed"),
    ("fresh_p50_ms", "fresh ms"),
    ("fresh_computed_tokens", "computed"),
    ("session_text_p50_ms", "session text ms"),
    ("session_text_computed_tokens", "computed"),
    ("fresh_text_p50_ms", "fresh text ms"),
    ("fresh_text_computed_tokens", "computed"),
    ("fresh_per_session", "fresh/session"),
)


@dataclass(slots=True)
class Chat:
    """One chat in one way.

    Attributes:
        user: Its own user.
        mode: ``injected`` or ``text``.
        session: Its session, or None for fresh retrieval.
        history: The conversation so far.
    """

    user: str
    mode: str
    session: str | None
    history: list[dict[str, str]] = field(default_factory=list)

    async def turn(self, client: ChatClient, question: str, k: int, max_tokens: int) -> Answer:
        """Asks the next question and keeps question and answer."""
        ask = Ask(self.user, question, k, self.mode, max_tokens)
        ask = replace(ask, session=self.session, history=tuple(self.history))
        answer = await client.ask(ask)
        self.history.append({"role": "user", "content": question})
        self.history.append({"role": "assistant", "content": answer.text})
        return answer


def one_user_a_chat(workload: Workload, chats: int) -> Workload:
    """Gives each way of each chat a user of its own, with the facts and questions of one.

    Args:
        workload: At least ``chats`` users.
        chats: Repetitions.
    """
    lines: list[dict[str, str]] = []
    users: list[str] = []
    questions: dict[str, list[str]] = {}
    for user in workload.users[:chats]:
        for way, _ in WAYS:
            name = f"{user}-{way}"
            users.append(name)
            questions[name] = workload.questions[user]
            lines += [dict(line, user=name) for line in workload.lines if line["user"] == user]
    return Workload(lines, users, questions)


async def measure(
    client: ChatClient, users: Sequence[str], workload: Workload, turns: int, k: int, tokens: int
) -> list[Row]:
    """Holds the chats.

    Args:
        client: One connection; requests go one after the other.
        users: Users before ``one_user_a_chat``, one a chat.
        workload: After it, with ``turns`` questions of each.
        turns: Questions of a chat.
        k: Facts that each turn retrieves.
        tokens: Length of an answer.

    Returns:
        One row for each turn.
    """
    found: list[dict[str, list[Answer]]] = [{way: [] for way, _ in WAYS} for _ in range(turns)]
    for number, user in enumerate(users):
        say(f"chat {number + 1} of {len(users)}")
        chats = {
            way: Chat(f"{user}-{way}", mode, "bench" if way.startswith("session") else None)
            for way, mode in WAYS
        }
        for turn in range(turns):
            # The order changes, so that a slow moment does not favour one of them.
            shift = (turn + number) % len(WAYS)
            for way, _ in (*WAYS[shift:], *WAYS[:shift]):
                question = workload.questions[f"{user}-{way}"][turn]
                found[turn][way].append(await chats[way].turn(client, question, k, tokens))
    return [_row(turn, answers) for turn, answers in enumerate(found, 1)]


def _row(turn: int, answers: dict[str, list[Answer]]) -> Row:
    row: dict[str, Any] = {"turn": turn, "chats": len(answers["session"])}
    row["prompt_tokens"] = _middle([a.prompt_tokens for a in answers["session"]])
    for way, given in answers.items():
        row[f"{way}_p50_ms"] = round(statistics.median(a.ttft_s for a in given) * 1e3, 2)
        # Injected tokens count as cached: what is left is what the model had to read.
        row[f"{way}_computed_tokens"] = _middle([a.prompt_tokens - a.cached_tokens for a in given])
        row[f"{way}_cached_tokens"] = _middle([a.cached_tokens for a in given])
        row[f"{way}_facts"] = _middle([a.memory["facts"] for a in given])
    row["fresh_per_session"] = ratio(row["fresh_p50_ms"], row["session_p50_ms"])
    return row


def _middle(values: Sequence[int]) -> int:
    return round(statistics.median(values))


def later_note(rows: Sequence[Row]) -> str:
    """All turns after the first one together."""
    later = rows[1:]
    parts = []
    for way, _ in WAYS:
        times = sum(row[f"{way}_p50_ms"] for row in later)
        read = sum(row[f"{way}_computed_tokens"] for row in later)
        parts.append(f"{way} {times / 1e3:.2f} s, {read} tokens computed")
    return f"turns 2 to {rows[-1]['turn']}, sums of the medians: {'; '.join(parts)}"
