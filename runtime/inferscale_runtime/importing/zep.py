"""Reads Zep's API, version 4: the facts on the edges of each user's graph.

A fact that Zep superseded (``expired_at``) or that ended (``invalid_at`` is past) is not read, so
that it is deleted here. Zep lists no changes, so every reading lists all edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from pydantic import Field, TypeAdapter

from inferscale_runtime.importing.answers import Answer, by_cursor, checked, refuse_later_page
from inferscale_runtime.importing.client import ToolClient
from inferscale_runtime.importing.records import (
    ToolFact,
    ToolMemory,
    ToolTurn,
    ToolUser,
    in_order,
    instant,
    moment,
    user_problem,
)

DEFAULT_URL = "https://api.getzep.com"
PAGE = 100
"""Largest page that Zep documents."""
_USERS_PATH = "/api/v4/users/list"


class _User(Answer):
    uuid: str = Field(min_length=1)
    user_id: str | None = None


class _Edge(Answer):
    uuid: str = Field(min_length=1)
    fact: str = ""
    created_at: str | None = None
    valid_at: str | None = None
    invalid_at: str | None = None
    expired_at: str | None = None
    episode_uuids: list[str] | None = None


class _Episode(Answer):
    uuid: str = Field(min_length=1)
    content: str = ""
    created_at: str | None = None
    reference_time: str | None = None
    role: str | None = None
    role_type: str | None = None


class _Users(Answer):
    items: list[_User] | None = None
    next_cursor: str | None = None


class _Edges(Answer):
    items: list[_Edge] | None = None
    next_cursor: str | None = None


class _Episodes(Answer):
    items: list[_Episode] | None = None
    next_cursor: str | None = None


_USERS, _EDGES, _EPISODES = TypeAdapter(_Users), TypeAdapter(_Edges), TypeAdapter(_Episodes)


class ZepReader:
    """Zep's users, facts and episodes.

    Args:
        client: Of Zep's address.
        turns: Whether to read episodes as source turns.
        now: Time with zone; tests replace it.
    """

    origin = "zep"

    def __init__(
        self,
        client: ToolClient,
        *,
        turns: bool = False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.source = client.url
        self._client, self._turns, self._now = client, turns, now
        self._skipped: dict[str, int] = {}

    def users(self) -> list[ToolUser]:
        """Lists users; one is known by ``user_id``, or by its UUID where it has none."""
        found: dict[str, ToolUser] = {}
        self._skipped = {}
        for user in self._pages(_USERS_PATH, _USERS, "uuid"):
            name = user.user_id or user.uuid
            problem = user_problem(name)
            if problem:
                self._skipped[problem] = self._skipped.get(problem, 0) + 1
            else:
                keys = found[name].keys if name in found else ()
                found[name] = ToolUser(name, tuple(dict.fromkeys((*keys, user.uuid))))
        return list(found.values())

    def skipped(self) -> dict[str, int]:
        """See `Reader.skipped`."""
        return dict(self._skipped)

    def read(self, user: ToolUser, known: ToolMemory) -> ToolMemory:
        """See `Reader.read`; a user that is gone by now has nothing."""
        edges: list[_Edge] = []
        episodes: list[_Episode] = []
        for uuid in user.keys:
            graph = f"/api/v4/graphs/{quote(uuid, safe='')}"
            edges += self._pages(f"{graph}/edges/list", _EDGES, "uuid")
            if self._turns:
                episodes += self._pages(f"{graph}/episodes/list", _EPISODES, "uuid")
        turns = tuple(map(_turn, sorted(episodes, key=_when)))
        there = {turn.id for turn in turns}
        now = self._now()
        facts = [
            (edge.created_at, _fact(edge, there))
            for edge in edges
            if not edge.expired_at and not _past(edge.invalid_at, now)
        ]
        return ToolMemory(in_order(facts), turns)

    def close(self) -> None:
        """See `Reader.close`."""
        self._client.close()

    def _pages(self, path: str, form: TypeAdapter[Any], order: str) -> Iterator[Any]:
        where = f"zep: POST {self.source}{path}"

        def ask(cursor: str | None) -> tuple[list[Any], str | None]:
            query = {"page_size": PAGE, "cursor": cursor, "order_by": order, "order": "asc"}
            answer = self._client.post(path, {}, query, optional=path != _USERS_PATH)
            if answer is None:
                refuse_later_page(cursor, where)
                return [], None
            page = checked(form, answer, where)
            return page.items or [], page.next_cursor

        return by_cursor(ask, where)


def _turn(episode: _Episode) -> ToolTurn:
    speaker = episode.role or episode.role_type or ""
    return ToolTurn(
        episode.uuid, speaker, episode.content, episode.reference_time or episode.created_at
    )


def _when(episode: _Episode) -> tuple[datetime, str]:
    return moment(episode.reference_time or episode.created_at), episode.uuid


def _fact(edge: _Edge, turns: set[str]) -> ToolFact:
    source = next((uuid for uuid in edge.episode_uuids or () if uuid in turns), None)
    return ToolFact(edge.uuid, edge.fact, edge.valid_at or edge.created_at, source)


def _past(time: str | None, now: datetime) -> bool:
    """Whether a fact has ended; one with a time that cannot be read has, to be on the safe side."""
    if not time:
        return False
    end = instant(time)
    return end is None or end <= now
