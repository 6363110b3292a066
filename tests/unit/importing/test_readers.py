"""Each tool's documented calls: who is listed, what is a fact, what is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest
from tests.unit.importing.tool_servers import (
    TOKEN,
    LettaServer,
    Mem0Platform,
    Mem0Server,
    ToolServer,
    ZepServer,
    status,
)

from inferscale_runtime.errors import ConfigError, SourceError
from inferscale_runtime.importing import mem0_http
from inferscale_runtime.importing.answers import Reader
from inferscale_runtime.importing.records import ToolFact, ToolMemory, ToolTurn
from inferscale_runtime.importing.tools import open_reader, parse_options, split_source

_Server = TypeVar("_Server", bound=ToolServer)
Start = Callable[[_Server], _Server]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Any]]:
    for tool in ("MEM0", "ZEP", "LETTA"):
        monkeypatch.setenv(f"{tool}_API_KEY", TOKEN)
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(server)


def reader(tool: str, server: ToolServer, **options: str) -> Reader:
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return open_reader(tool, server.url, named, None, "--token-file")


def everything(source: Reader) -> dict[str, ToolMemory]:
    return {user.id: source.read(user, ToolMemory()) for user in source.users()}


def edge(uuid: str, fact: str, **fields: Any) -> dict[str, Any]:
    times = {"created_at": f"2026-01-0{uuid[-1]}T00:00:00Z"}
    return {"uuid": uuid, "fact": fact, "name": "IS", "graph_uuid": "g", **times, **fields}


def test_zep(start: Any) -> None:
    zep = start(ZepServer())
    zep.users += [{"uuid": f"u{n}", "user_id": f"user{n}"} for n in range(5)]
    zep.users.append({"uuid": "u9"})
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    zep.edges["u1"] = [
        edge("e3", "third", valid_at="2020-05-01T00:00:00Z", episode_uuids=["gone", "p1"]),
        edge("e1", "first"),
        edge("e2", "superseded", expired_at="2026-01-03T00:00:00Z"),
        edge("e4", "ended", invalid_at="2026-01-04T00:00:00Z"),
        edge("e5", "ends tomorrow", invalid_at=later),
    ]
    zep.episodes["u1"] = [
        {"uuid": "p2", "content": "Hello Ann", "role": "Bot", "created_at": "2026-01-02T00:00:00Z"},
        {"uuid": "p1", "content": "Hi", "role_type": "user", "created_at": "2026-01-01T00:00:00Z"},
    ]
    found = everything(reader("zep", zep, turns="true"))
    assert sorted(found) == ["u9", "user0", "user1", "user2", "user3", "user4"]
    assert found["user1"] == ToolMemory(
        (
            ToolFact("e1", "first", "2026-01-01T00:00:00Z"),
            ToolFact("e3", "third", "2020-05-01T00:00:00Z", "p1"),
            ToolFact("e5", "ends tomorrow", "2026-01-05T00:00:00Z"),
        ),
        (
            ToolTurn("p1", "user", "Hi", "2026-01-01T00:00:00Z"),
            ToolTurn("p2", "Bot", "Hello Ann", "2026-01-02T00:00:00Z"),
        ),
    )
    assert found["user0"] == ToolMemory()  # a user whose graph has not been made yet
    assert everything(reader("zep", zep))["user1"].turns == ()


def test_a_list_that_is_cut_between_pages_is_not_taken_for_whole(start: Any) -> None:
    zep = start(ZepServer())
    zep.users.append({"uuid": "u1", "user_id": "ann"})
    zep.edges["u1"] = [edge(f"e{n}", "x") for n in range(1, 6)]
    source = reader("zep", zep)
    (ann,) = source.users()

    async def page_one(request: Any) -> Any:
        zep.misbehave.append(status(404))
        del zep.edges["u1"][3:]
        return await zep.routes()[1].handler(request)

    zep.edges["u1"].append(edge("e9", "x"))
    zep.misbehave.append(page_one)
    with pytest.raises(SourceError, match="deleted while it was read"):
        source.read(ann, ToolMemory())


def agent(number: int, *people: str, tags: tuple[str, ...] = ()) -> dict[str, Any]:
    who = [{"identifier_key": name, "identity_type": "user", "id": "i"} for name in people]
    return {"id": f"agent-{number}", "identities": who, "tags": list(tags), "name": "helper"}


def test_letta(start: Any) -> None:
    letta = start(LettaServer())
    letta.agents += [
        agent(1, "ann"),
        agent(2, "ben"),
        agent(3, "ann"),
        agent(4),
        agent(5, "a", "b"),
    ]
    company = {"identifier_key": "acme", "identity_type": "org", "id": "i"}
    letta.agents[1]["identities"].append(company)
    letta.blocks["agent-1"] = [
        {"id": "block-1", "label": "human", "value": "- Likes tea.\n\n  Has a dog. \n- Likes tea."},
        {"id": "block-2", "label": "persona", "value": "I am helpful."},
        {"id": "block-3", "label": "plans", "value": "Goes to Rome."},
    ]
    letta.passages["agent-1"] = [
        {"id": "p2", "text": "late", "created_at": "2026-03-01T00:00:00Z"},
        {"id": "p1", "text": "early", "created_at": "2026-01-01T00:00:00Z",
         "updated_at": "2026-04-01T00:00:00Z"},
        {"id": "p0", "text": "gone", "created_at": "2026-01-01T00:00:00Z", "is_deleted": True},
    ]  # fmt: skip
    letta.passages["agent-3"] = [{"id": "p3", "text": "other agent", "created_at": None}]
    source = reader("letta", letta)
    found = everything(source)
    assert source.skipped() == {"agent of no user": 1, "agent of several users": 1}
    assert sorted(found) == ["ann", "ben"]
    texts = [(fact.text, fact.time) for fact in found["ann"].facts]
    assert texts == [
        ("Likes tea.", None),
        ("Has a dog.", None),
        ("other agent", None),
        ("early", "2026-04-01T00:00:00Z"),
        ("late", "2026-03-01T00:00:00Z"),
    ]
    # A line that moves inside its block keeps its id.
    before = {fact.text: fact.id for fact in found["ann"].facts}
    letta.blocks["agent-1"][0]["value"] = "New line.\nHas a dog.\nLikes tea."
    after = {fact.text: fact.id for fact in everything(source)["ann"].facts}
    assert {text: after[text] for text in before} == before
    plans = everything(reader("letta", letta, blocks="plans"))["ann"].facts
    assert [fact.text for fact in plans][:1] == ["Goes to Rome."]


def test_letta_users_by_tag_or_agent(start: Any) -> None:
    letta = start(LettaServer())
    letta.agents += [agent(1, tags=("user:ann", "prod")), agent(2, tags=("prod",))]
    by_tag = reader("letta", letta, users_from="tag:user:")
    assert [user.id for user in by_tag.users()] == ["ann"]
    assert by_tag.skipped() == {"agent of no user": 1}
    by_agent = reader("letta", letta, users_from="agent")
    assert [user.id for user in by_agent.users()] == ["agent-1", "agent-2"]
    with pytest.raises(ConfigError, match="users-from"):
        reader("letta", letta, users_from="name")


def memory(number: int, user: str | None = "ann", **fields: Any) -> dict[str, Any]:
    time = f"2026-01-{number:02}T00:00:00+00:00"
    return {"id": f"m{number}", "memory": f"fact {number}", "user_id": user, "created_at": time,
            "updated_at": None, "metadata": {}, **fields}  # fmt: skip


def test_mem0_server(start: Any) -> None:
    mem0 = start(Mem0Server())
    mem0.memories += [
        memory(2, updated_at="2026-02-02T00:00:00+00:00"),
        memory(1),
        memory(3, expiration_date="2026-01-31"),
        memory(4, expiration_date="2999-01-01"),
        memory(5, "ben", agent_id="helper"),
        memory(6, None, agent_id="helper"),
    ]
    source = reader("mem0", mem0)
    found = everything(source)
    assert [fact.id for fact in found["ann"].facts] == ["m1", "m2", "m4"]
    assert [fact.time for fact in found["ann"].facts][1] == "2026-02-02T00:00:00+00:00"
    assert [fact.id for fact in found["ben"].facts] == ["m5"]
    marks = {user.id: user.marker for user in source.users()}
    mem0.memories.append(memory(7, "ben"))
    again = {user.id: user.marker for user in source.users()}
    assert again["ann"] == marks["ann"]
    assert again["ben"] != marks["ben"]


@pytest.mark.parametrize(("page", "words"), [(1, "2 memories and 1 were listed"), (1000, "")])
def test_mem0_server_that_lists_too_little(start: Any, page: int, words: str) -> None:
    mem0 = start(Mem0Server())
    mem0.memories += [memory(1), memory(2)]
    mem0.page = page
    if not words:
        assert len(everything(reader("mem0", mem0))["ann"].facts) == 2
        return
    with pytest.raises(SourceError, match=words):
        everything(reader("mem0", mem0))


def test_mem0_server_with_more_than_it_can_list(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mem0 = start(Mem0Server())
    mem0.memories += [memory(n) for n in range(1, 6)]
    monkeypatch.setattr(mem0_http, "SERVER_ROWS", 5)
    with pytest.raises(SourceError, match="user 'ann' has 5 memories or more"):
        everything(reader("mem0", mem0))
    monkeypatch.setattr(mem0_http, "SERVER_SCAN", 5)
    with pytest.raises(SourceError, match="may have left some out"):
        everything(reader("mem0", mem0))


def test_mem0_platform(start: Any) -> None:
    mem0 = start(Mem0Platform())
    mem0.memories += [memory(n) for n in range(1, 6)]
    mem0.memories += [memory(6, replaced_by="m5"), memory(7, "ben"), memory(8, "cleo")]
    said = [{"role": "user", "content": "I moved."}, {"role": "assistant", "content": "Where to?"}]
    entry = {"id": "h1", "event": "ADD", "input": said, "created_at": "2026-01-01T00:00:00Z"}
    mem0.history |= {"m1": [entry], "m2": [entry]}
    source = reader("mem0", mem0, api="platform", turns="true")
    found = everything(source)
    assert sorted(found) == ["ann", "ben", "cleo"]
    ann = found["ann"]
    assert [fact.id for fact in ann.facts] == ["m1", "m2", "m3", "m4", "m5"]
    assert [turn.text for turn in ann.turns] == ["I moved.", "Where to?"]
    assert [fact.turn_id for fact in ann.facts] == [ann.turns[0].id] * 2 + [None] * 3
    # The messages behind an unchanged memory are not asked for again.
    mem0.requests.clear()
    user = next(user for user in source.users() if user.id == "ann")
    assert source.read(user, ann) == ann
    asked = [request for request in mem0.requests if "history" in request]
    assert asked == [f"GET /v1/memories/m{n}/history/" for n in (3, 4, 5)]


def test_mem0_platform_that_changes_while_it_is_read(start: Any) -> None:
    mem0 = start(Mem0Platform())
    mem0.memories += [memory(n) for n in range(1, 6)]
    source = reader("mem0", mem0, api="platform")
    (ann,) = source.users()

    async def page_one(request: Any) -> Any:
        answer = await mem0.routes()[1].handler(request)
        del mem0.memories[0]  # every later page moves up by one
        return answer

    mem0.misbehave.append(page_one)
    found = source.read(ann, ToolMemory()).facts
    assert [fact.id for fact in found] == ["m2", "m3", "m4", "m5"]


@pytest.mark.parametrize(
    ("tool", "body", "field"),
    [
        ("zep", {"items": [{"user_id": "private"}]}, "items.uuid"),
        ("letta", {"agents": []}, "answer"),
        ("mem0", [{"id": "private", "type": "user"}], "total_memories"),
    ],
)
def test_answers_of_another_version_are_refused(
    start: Any, tool: str, body: Any, field: str
) -> None:
    from aiohttp import web

    server = start({"zep": ZepServer, "letta": LettaServer, "mem0": Mem0Server}[tool]())

    async def answer(_: Any) -> Any:
        return web.json_response(body)

    server.misbehave.append(answer)
    with pytest.raises(ConfigError, match=f"field '{field}' is not as documented") as caught:
        reader(tool, server).users()
    assert "private" not in str(caught.value)


def test_sources_and_options() -> None:
    assert split_source("zep") == ("zep", "https://api.getzep.com")
    assert split_source("mem0:http://h:1/x") == ("mem0", "http://h:1/x")
    for wrong in ("mem1:http://h", "mem0", "mem0:"):
        with pytest.raises(ConfigError, match="source"):
            split_source(wrong)
    assert parse_options("letta", ["users-from=tag:a=b", "blocks=human"]) == {
        "users-from": "tag:a=b",
        "blocks": "human",
    }
    for pairs in (["turns=true"], ["blocks"], ["blocks=a", "blocks=b"]):
        with pytest.raises(ConfigError, match="option '"):
            parse_options("letta", pairs)
    with pytest.raises(ConfigError, match="write true or false"):
        open_reader("zep", "http://h", {"turns": "yes"}, None, "--token-file")
    with pytest.raises(ConfigError, match="write platform or server"):
        open_reader("mem0", "http://h", {"api": "x"}, None, "--token-file")
    with pytest.raises(ConfigError, match="'turns' is for the platform"):
        open_reader("mem0", "http://h", {"turns": "true"}, None, "--token-file")
    with pytest.raises(ConfigError, match="No such file"):
        open_reader("mem0", "/none/config.json", {}, None, "--token-file")
