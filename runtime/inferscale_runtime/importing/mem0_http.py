"""Reads Mem0 by HTTP: the server that comes with the open-source library, and the platform."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from pydantic import Field, TypeAdapter

from inferscale_runtime.errors import SourceError
from inferscale_runtime.importing.answers import Answer, checked
from inferscale_runtime.importing.client import Query, ToolClient
from inferscale_runtime.importing.mem0_rows import ORIGIN, Row, facts, today, valid
from inferscale_runtime.importing.records import (
    ToolFact,
    ToolMemory,
    ToolTurn,
    ToolUser,
    moment,
    short_digest,
    user_problem,
)

PLATFORM_URL = "https://api.mem0.ai"
SERVER_ROWS = 1000
"""Most memories of one user that the server lists, and it has no pages."""
SERVER_SCAN = 10_000
"""Memories that the server looks at when it lists users."""
PAGE = 200
"""Largest page that the platform documents."""
_READINGS = 4
"""Times that a user is read when something changed meanwhile (arbitrary)."""


class _ServerEntity(Answer):
    id: str
    type: str
    total_memories: int
    updated_at: str | None = None


class _Results(Answer):
    results: list[Row]
    next: str | None = None


class _PlatformEntity(Answer):
    name: str
    type: str


class _PlatformEntities(Answer):
    results: list[_PlatformEntity]
    next: str | None = None


class _Message(Answer):
    role: str = ""
    content: str = ""


class _Entry(Answer):
    id: str = Field(min_length=1)
    event: str = ""
    input: list[_Message] | None = None
    created_at: str | None = None


_SERVER_ENTITIES, _RESULTS = TypeAdapter(list[_ServerEntity]), TypeAdapter(_Results)
_PLATFORM_ENTITIES, _HISTORY = TypeAdapter(_PlatformEntities), TypeAdapter(list[_Entry])


class _Skips:
    """Counts what is left out."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def takes(self, problem: str | None) -> bool:
        if problem:
            self.counts[problem] = self.counts.get(problem, 0) + 1
        return bool(problem)


class Mem0Server:
    """The open-source server.

    Its list of users tells when each user's memory last changed and how many memories there are;
    a user with the same figures is not read again.

    Args:
        client: Of the server's address.
    """

    origin = ORIGIN

    def __init__(self, client: ToolClient) -> None:
        self.source = client.url
        self._client = client
        self._skips = _Skips()

    def users(self) -> list[ToolUser]:
        """See `Reader.users`.

        Raises:
            SourceError: The server has more memories than it looks at, so that users may be
                missing from its list.
        """
        self._skips = _Skips()
        entities = checked(
            _SERVER_ENTITIES, self._client.get("/entities"), f"mem0: GET {self.source}/entities"
        )
        # Each memory counts for at least one entity.
        if sum(entity.total_memories for entity in entities) >= SERVER_SCAN:
            raise SourceError(
                f"mem0: {self.source} looks at {SERVER_SCAN} memories when it lists users and may "
                "have left some out. Nothing was changed; read it through the library's "
                "configuration instead (docs/sources.md)"
            )
        return [
            ToolUser(entity.id, (entity.id,), _marker(entity), entity.total_memories)
            for entity in entities
            if entity.type == "user" and not self._skips.takes(user_problem(entity.id))
        ]

    def skipped(self) -> dict[str, int]:
        """See `Reader.skipped`."""
        return dict(self._skips.counts)

    def read(self, user: ToolUser, known: ToolMemory) -> ToolMemory:
        """See `Reader.read`.

        Raises:
            SourceError: The user has more memories than the server lists.
        """
        where = f"mem0: GET {self.source}/memories"
        expected = user.expected or 0
        for _ in range(_READINGS):
            query: Query = {"user_id": user.id, "top_k": SERVER_ROWS, "show_expired": True}
            rows = checked(_RESULTS, self._client.get("/memories", query), where).results
            if len(rows) >= SERVER_ROWS:
                raise SourceError(
                    f"{where}: user '{user.id}' has {SERVER_ROWS} memories or more, which the "
                    "server does not list whole. Nothing of this user was changed; read it through "
                    "the library's configuration instead (docs/sources.md)"
                )
            # Fewer than counted: some were deleted since, or an older server cuts its list short.
            if len(rows) >= expected:
                return ToolMemory(facts(valid(rows, today())))
            again = {found.id: found.expected or 0 for found in self.users()}
            expected = again.get(user.id, 0)
        raise SourceError(
            f"{where}: user '{user.id}' has {expected} memories and {len(rows)} were listed. "
            "Nothing of this user was changed; if it stays so, the server is too old "
            "(docs/sources.md)"
        )

    def close(self) -> None:
        """See `Reader.close`."""
        self._client.close()


def _marker(entity: _ServerEntity) -> str | None:
    """Expiry changes a memory without a trace, so the day is part of it."""
    if entity.updated_at is None:
        return None
    return f"{entity.updated_at}/{entity.total_memories}/{today().isoformat()}"


class Mem0Platform:
    """Mem0's hosted platform.

    Args:
        client: Of its address.
        turns: Whether to read the messages that each memory was made from; one request for each
            memory that is new or changed.
    """

    origin = ORIGIN

    def __init__(self, client: ToolClient, *, turns: bool = False) -> None:
        self.source = client.url
        self._client, self._turns = client, turns
        self._skips = _Skips()

    def users(self) -> list[ToolUser]:
        """See `Reader.users`."""
        self._skips = _Skips()
        found: dict[str, ToolUser] = {}
        path, query = "/v1/entities/", dict[str, str]()
        where = f"mem0: GET {self.source}{path}"
        seen: set[str] = set()
        while True:
            page = checked(_PLATFORM_ENTITIES, self._client.get(path, query), where)
            for entity in page.results:
                if entity.type == "user" and not self._skips.takes(user_problem(entity.name)):
                    found[entity.name] = ToolUser(entity.name, (entity.name,))
            if not page.next:
                return list(found.values())
            if page.next in seen:
                raise SourceError(f"{where}: the pages repeat; run the same command again")
            seen.add(page.next)
            # Only its query: the token goes to the address that was given.
            query = dict(parse_qsl(urlsplit(page.next).query))

    def skipped(self) -> dict[str, int]:
        """See `Reader.skipped`."""
        return dict(self._skips.counts)

    def read(self, user: ToolUser, known: ToolMemory) -> ToolMemory:
        """See `Reader.read`."""
        where = f"mem0: POST {self.source}/v3/memories/"
        before: dict[str, Row] | None = None
        for _ in range(_READINGS):
            pages = list(self._pages(user, where))
            rows = {row.id: row for page in pages for row in page.results}
            # Pages by number lose a memory when an earlier one is deleted meanwhile, so several
            # pages count only when they say the same twice.
            if len(pages) == 1 or rows == before:
                found = facts(valid(list(rows.values()), today()))
                return self._with_turns(found, known) if self._turns else ToolMemory(found)
            before = rows
        raise SourceError(
            f"{where}: the memory of user '{user.id}' changes faster than it is read. Nothing of "
            "this user was changed; run the same command again"
        )

    def close(self) -> None:
        """See `Reader.close`."""
        self._client.close()

    def _pages(self, user: ToolUser, where: str) -> Iterator[_Results]:
        number = 1
        while True:
            answer = self._client.post(
                "/v3/memories/",
                {"filters": {"user_id": user.id}},
                {"page": number, "page_size": PAGE},
            )
            page = checked(_RESULTS, answer, where)
            yield page
            if not page.next or not page.results:
                return
            number += 1

    def _with_turns(self, found: tuple[ToolFact, ...], known: ToolMemory) -> ToolMemory:
        """Adds the messages behind each memory; those of an unchanged one are taken over."""
        before = {fact.id: fact for fact in known.facts}
        groups: dict[str, list[ToolTurn]] = {}
        for turn in known.turns:
            groups.setdefault(_group(turn.id), []).append(turn)
        turns: dict[str, ToolTurn] = {}
        linked = []
        for fact in found:
            source: str | None
            old = before.get(fact.id)
            if old is not None and old.turn_id and (old.text, old.time) == (
                " ".join(fact.text.split()), fact.time
            ):  # fmt: skip
                source, group = old.turn_id, groups.get(_group(old.turn_id), [])
            else:
                source, group = self._history(fact.id)
            turns |= {turn.id: turn for turn in group}
            linked.append(ToolFact(fact.id, fact.text, fact.time, source))
        ordered = sorted(turns.values(), key=lambda turn: (moment(turn.time), turn.id))
        return ToolMemory(tuple(linked), tuple(ordered))

    def _history(self, memory_id: str) -> tuple[str | None, list[ToolTurn]]:
        path = f"/v1/memories/{quote(memory_id, safe='')}/history/"
        answer: Any = self._client.get(path, optional=True)
        entries = checked(
            _HISTORY, answer or [], f"mem0: GET {self.source}/v1/memories/ID/history/"
        )
        entries = [entry for entry in entries if entry.input and entry.event != "DELETE"]
        if not entries:
            return None, []
        entry = entries[-1]
        messages = entry.input or []
        time = entry.created_at
        group = short_digest(time or "", *(f"{m.role}\0{m.content}" for m in messages))
        turns = [
            ToolTurn(f"{group}:{n:04}", message.role, message.content, time)
            for n, message in enumerate(messages)
        ]
        # What the person said made the memory, where there is such a message.
        spoken = [turn for turn in turns if turn.speaker == "user"] or turns
        return spoken[-1].id, turns


def _group(turn_id: str) -> str:
    return turn_id.rpartition(":")[0]
