"""``--source``: a tool's memory as input, and who is gone from it, which the store tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.unit.importing.tool_servers import TOKEN, ZepServer

from inferscale_runtime.config import QuotaConfig
from inferscale_runtime.encode.input import UserInput
from inferscale_runtime.encode.tool_source import ToolSource, read_tool
from inferscale_runtime.errors import InputError, SourceError
from inferscale_runtime.store.living import FactWrite, put_facts
from inferscale_runtime.store.store import Store


@pytest.fixture
def zep(monkeypatch: pytest.MonkeyPatch) -> Iterator[ZepServer]:
    monkeypatch.setenv("ZEP_API_KEY", TOKEN)
    with ZepServer() as server:
        for user in ("ann", "ben"):
            server.users.append({"uuid": f"id-{user}", "user_id": user})
            server.edges[f"id-{user}"] = [{"uuid": f"{user}1", "fact": f"{user} likes tea"}]
        yield server


def read(
    zep: ZepServer, store: Path, *, only: str = "", allow_empty: bool = False, limit: int = 1 << 20
) -> dict[str, UserInput]:
    source = ToolSource(f"zep:{zep.url}", (), None, allow_empty)
    return read_tool(source, str(store), lambda user: not only or user == only, limit)


def remember(store: Path, user: str, origin: str) -> None:
    opened = Store.open(str(store), create=True)
    row = np.ones((1, 1), np.float32)
    write = FactWrite(f"{origin}-{user}", "something")
    put_facts(
        opened,
        user,
        [write],
        origin=origin,
        embedder="e",
        embed=lambda texts: row,
        limits=QuotaConfig(),
    )


def test_every_user_and_only_its_own_origin(zep: ZepServer, tmp_path: Path) -> None:
    users = read(zep, tmp_path / "none")
    assert {user: [fact.id for fact in given.facts] for user, given in users.items()} == {
        "ann": ["ann1"],
        "ben": ["ben1"],
    }
    assert {given.origins for given in users.values()} == {frozenset({"zep"})}
    assert {fact.origin for given in users.values() for fact in given.facts} == {"zep"}


def test_who_is_listed_no_more_has_lost_what_came_from_there(
    zep: ZepServer, tmp_path: Path
) -> None:
    for user, origin in (("cleo", "zep"), ("dan", "mem0"), ("ann", "zep")):
        remember(tmp_path, user, origin)
    users = read(zep, tmp_path)
    assert users["cleo"] == UserInput("cleo", (), (), frozenset({"zep"}))
    assert "dan" not in users


def test_a_shard_asks_for_its_own_users_only(zep: ZepServer, tmp_path: Path) -> None:
    remember(tmp_path, "cleo", "zep")
    assert set(read(zep, tmp_path, only="ben")) == {"ben"}
    assert not any("id-ann" in request for request in zep.requests)


def test_an_empty_list_needs_a_word(zep: ZepServer, tmp_path: Path) -> None:
    zep.users.clear()
    assert read(zep, tmp_path / "none") == {}
    remember(tmp_path, "cleo", "zep")
    with pytest.raises(SourceError, match="--allow-empty-source"):
        read(zep, tmp_path)
    assert set(read(zep, tmp_path, allow_empty=True)) == {"cleo"}


def test_the_limit_of_the_input_holds(zep: ZepServer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"encoding\.max_input_bytes"):
        read(zep, tmp_path, limit=100)
