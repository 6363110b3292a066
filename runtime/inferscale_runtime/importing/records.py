"""What is read out of a tool, and how it becomes lines of the input format (pure).

The tools' own limits differ from ours. What has no place in the input format is mended here, the
same way on every run, so that an unchanged memory gives unchanged lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

MAX_FACT_CHARS = 8192
MAX_USER_BYTES = 512

Line = dict[str, str]
"""One line of the input format, before it becomes JSON."""


@dataclass(frozen=True, slots=True)
class ToolTurn:
    """One message that a tool kept.

    Attributes:
        id: Unique among the user's turns.
        speaker: Who said it.
        text: The message.
        time: ISO 8601, or None.
    """

    id: str
    speaker: str
    text: str
    time: str | None = None


@dataclass(frozen=True, slots=True)
class ToolFact:
    """One memory of a tool.

    Attributes:
        id: The tool's own id.
        text: The memory.
        time: ISO 8601, or None.
        turn_id: The turn that it came from, or None.
    """

    id: str
    text: str
    time: str | None = None
    turn_id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolMemory:
    """Everything that a tool holds about one user, in the order in which it was learnt."""

    facts: tuple[ToolFact, ...] = ()
    turns: tuple[ToolTurn, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolUser:
    """One user that a tool lists.

    Attributes:
        id: The user's id, also in the store.
        keys: What the tool's own calls name the user, or the user's parts, by.
        marker: Changes whenever the user's memory changes, so that an equal one needs no reading;
            None when the tool tells nothing of the kind.
        expected: How many memories the tool counts for the user, or None.
    """

    id: str
    keys: tuple[str, ...] = ()
    marker: str | None = None
    expected: int | None = None


def user_problem(user: str) -> str | None:
    """Why an id cannot name a user here, or None."""
    if not user.strip():
        return "empty id"
    if "\0" in user:
        return "NUL character in the id"
    if len(_utf8(user).encode()) > MAX_USER_BYTES:
        return f"id longer than {MAX_USER_BYTES} bytes"
    return None


def instant(text: str | None) -> datetime | None:
    """Reads an ISO 8601 time; UTC where it names no zone. None for anything else."""
    try:
        found = datetime.fromisoformat((text or "").strip())
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def moment(text: str | None) -> datetime:
    """As `instant`, for sorting: what has no time comes first."""
    return instant(text) or datetime.min.replace(tzinfo=UTC)


def in_order(facts: Iterable[tuple[str | None, ToolFact]]) -> tuple[ToolFact, ...]:
    """Sorts ``(time of creation, fact)`` by time, then id; tools list in orders of their own."""
    ordered = sorted(facts, key=lambda pair: (moment(pair[0]), pair[1].id))
    return tuple(fact for _, fact in ordered)


def clean(memory: ToolMemory) -> ToolMemory:
    """Makes a memory fit the input format.

    White space becomes single spaces, empty texts go, a repeated id counts once (pages of a list
    may overlap), a text above `MAX_FACT_CHARS` is cut at spaces into facts ``ID#1``, ``ID#2``, ...,
    and a turn that is not there is not named.
    """
    turns: dict[str, ToolTurn] = {}
    for turn in memory.turns:
        text, speaker = _utf8(turn.text), _utf8(turn.speaker)
        if text.strip():
            kept = replace(turn, text=text, speaker=speaker, time=turn.time or None)
            turns.setdefault(turn.id, kept)
    facts: dict[str, ToolFact] = {}
    for fact in memory.facts:
        turn_id = fact.turn_id if fact.turn_id in turns else None
        parts = _cut(" ".join(_utf8(fact.text).split()))
        for number, part in enumerate(parts, start=1):
            name = fact.id if len(parts) == 1 else f"{fact.id}#{number}"
            facts.setdefault(name, ToolFact(name, part, fact.time or None, turn_id))
    return ToolMemory(tuple(facts.values()), tuple(turns.values()))


def to_lines(user: str, origin: str, memory: ToolMemory) -> list[Line]:
    """Lines of one user, of which the first says that this is all that the tool holds.

    Args:
        user: The user's id.
        origin: Name of the tool; the lines replace only what came from it before.
        memory: As `clean` returns it.
    """
    common = {"user": _utf8(user), "origin": origin}
    lines: list[Line] = [{"kind": "user", **common}]
    for turn in memory.turns:
        line = {"kind": "turn", **common, "id": turn.id, "speaker": turn.speaker, "text": turn.text}
        lines.append(line | ({"time": turn.time} if turn.time else {}))
    for fact in memory.facts:
        line = {"kind": "fact", **common, "id": fact.id, "text": fact.text}
        line |= {"time": fact.time} if fact.time else {}
        lines.append(line | ({"turn": fact.turn_id} if fact.turn_id else {}))
    return lines


def from_lines(lines: Iterable[Mapping[str, str]]) -> ToolMemory:
    """Reads what `to_lines` wrote."""
    facts, turns = [], []
    for line in lines:
        if line["kind"] == "fact":
            found = ToolFact(line["id"], line["text"], line.get("time"), line.get("turn"))
            facts.append(found)
        elif line["kind"] == "turn":
            turns.append(ToolTurn(line["id"], line["speaker"], line["text"], line.get("time")))
    return ToolMemory(tuple(facts), tuple(turns))


@dataclass(frozen=True, slots=True)
class Difference:
    """Facts of one user that a reading created, changed, deleted or left as they were."""

    created: int = 0
    updated: int = 0
    deleted: int = 0
    unchanged: int = 0

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.created + other.created,
            self.updated + other.updated,
            self.deleted + other.deleted,
            self.unchanged + other.unchanged,
        )


def difference(old: ToolMemory, new: ToolMemory) -> Difference:
    """Compares two memories of one user by fact id."""
    before = {fact.id: fact for fact in old.facts}
    after = {fact.id: fact for fact in new.facts}
    kept = before.keys() & after.keys()
    same = sum(before[name] == after[name] for name in kept)
    return Difference(len(after) - len(kept), len(kept) - same, len(before) - len(kept), same)


def short_digest(*parts: str) -> str:
    """24 hex digits of a digest of texts, for ids of what has none of its own."""
    return hashlib.sha256("\0".join(map(_utf8, parts)).encode()).hexdigest()[:24]


def _cut(text: str) -> list[str]:
    parts = []
    while len(text) > MAX_FACT_CHARS:
        end = text.rfind(" ", 1, MAX_FACT_CHARS + 1)
        end = end if end > 0 else MAX_FACT_CHARS
        parts.append(text[:end])
        text = text[end:].lstrip(" ")
    return [*parts, text] if text else parts


def _utf8(text: str) -> str:
    """Halves of surrogate pairs, which JSON can spell and UTF-8 cannot, become question marks."""
    return text.encode("utf-8", "replace").decode()
