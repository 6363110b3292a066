"""Reads Letta's API, version 1: memory blocks and archival passages of the agents of each user.

Letta keeps memory for agents, not for people. Who an agent belongs to is told by its identities or
tags; an agent that belongs to nobody, or to several, is left out and counted. Letta lists no
changes, so every reading lists all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from pydantic import Field, TypeAdapter

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.importing.answers import Answer, after_last, checked, refuse_later_page
from inferscale_runtime.importing.client import ToolClient
from inferscale_runtime.importing.records import (
    ToolFact,
    ToolMemory,
    ToolUser,
    in_order,
    short_digest,
    user_problem,
)

DEFAULT_URL = "https://api.letta.com"
PAGE = 100
_AGENTS_PATH = "/v1/agents/"
IDENTITY, AGENT, TAG = "identity", "agent", "tag:"


class _Identity(Answer):
    identifier_key: str = Field(min_length=1)
    identity_type: str = "user"


class _Agent(Answer):
    id: str = Field(min_length=1)
    identities: list[_Identity] | None = None
    tags: list[str] | None = None


class _Block(Answer):
    id: str = Field(min_length=1)
    value: str = ""
    label: str | None = None


class _Passage(Answer):
    id: str = Field(min_length=1)
    text: str
    created_at: str | None = None
    updated_at: str | None = None
    is_deleted: bool | None = None


_AGENTS, _BLOCKS = TypeAdapter(list[_Agent]), TypeAdapter(list[_Block])
_PASSAGES = TypeAdapter(list[_Passage])


class LettaReader:
    """Letta's agents.

    Args:
        client: Of Letta's address.
        users_from: ``identity`` (the ``identifier_key`` of the agent's one identity of type
            user), ``tag:PREFIX`` (the rest of the agent's one tag that starts so), or ``agent``
            (each agent is a user of its own, by id).
        blocks: Labels of the memory blocks to read.
    """

    origin = "letta"

    def __init__(
        self,
        client: ToolClient,
        *,
        users_from: str = IDENTITY,
        blocks: tuple[str, ...] = ("human",),
    ) -> None:
        if users_from not in (IDENTITY, AGENT) and not users_from.startswith(TAG):
            raise ConfigError(
                f"source letta: option 'users-from' is '{users_from}'; write identity, agent or "
                "tag:PREFIX"
            )
        self.source = client.url
        self._client, self._users_from, self._blocks = client, users_from, frozenset(blocks)
        self._skipped: dict[str, int] = {}

    def users(self) -> list[ToolUser]:
        """Lists the agents, by user."""
        found: dict[str, list[str]] = {}
        self._skipped = {}
        query = {
            "order": "asc",
            "order_by": "created_at",
            "include": ["agent.identities", "agent.tags"],
        }
        for agent in self._pages(_AGENTS_PATH, _AGENTS, query):
            owners = self._owners(agent)
            if len(owners) != 1:
                problem = "agent of several users" if owners else "agent of no user"
            else:
                problem = user_problem(next(iter(owners))) or ""
            if problem:
                self._skipped[problem] = self._skipped.get(problem, 0) + 1
            else:
                found.setdefault(owners.pop(), []).append(agent.id)
        return [ToolUser(user, tuple(sorted(agents))) for user, agents in found.items()]

    def skipped(self) -> dict[str, int]:
        """See `Reader.skipped`."""
        return dict(self._skipped)

    def read(self, user: ToolUser, known: ToolMemory) -> ToolMemory:
        """See `Reader.read`; an agent that is gone by now has nothing."""
        blocks: dict[str, ToolFact] = {}
        passages = []
        for agent in user.keys:
            path = f"/v1/agents/{quote(agent, safe='')}"
            by_age = {"order": "asc", "order_by": "created_at"}
            for block in self._pages(f"{path}/core-memory/blocks", _BLOCKS, by_age):
                if block.label in self._blocks:
                    blocks |= {fact.id: fact for fact in _block_facts(block)}
            first_oldest = {"ascending": True}
            for passage in self._pages(f"{path}/archival-memory", _PASSAGES, first_oldest):
                if not passage.is_deleted:
                    time = passage.updated_at or passage.created_at
                    fact = ToolFact(passage.id, passage.text, time)
                    passages.append((passage.created_at, fact))
        return ToolMemory((*blocks.values(), *in_order(passages)))

    def close(self) -> None:
        """See `Reader.close`."""
        self._client.close()

    def _owners(self, agent: _Agent) -> set[str]:
        if self._users_from == AGENT:
            return {agent.id}
        if self._users_from == IDENTITY:
            people = (who for who in agent.identities or () if who.identity_type == "user")
            return {who.identifier_key for who in people}
        prefix = self._users_from.removeprefix(TAG)
        return {tag.removeprefix(prefix) for tag in agent.tags or () if tag.startswith(prefix)}

    def _pages(self, path: str, form: TypeAdapter[Any], query: dict[str, Any]) -> Iterator[Any]:
        where = f"letta: GET {self.source}{path}"

        def ask(last: str | None) -> list[Any]:
            page = {**query, "limit": PAGE, "after": last}
            answer = self._client.get(path, page, optional=path != _AGENTS_PATH)
            if answer is None:
                refuse_later_page(last, where)
                return []
            return checked(form, answer, where)

        return after_last(ask, lambda item: str(item.id))


def _block_facts(block: _Block) -> Iterator[ToolFact]:
    """One fact a line: a block is a page of notes that the agent edits line by line.

    The id is that of the line's text, so that a line which moves is the same fact.
    """
    for line in block.value.splitlines():
        text = line.strip().removeprefix("- ").strip()
        if text:
            yield ToolFact(f"{block.id}:{short_digest(text)}", text)
