"""Writing, reading, correcting and forgetting facts, over one replica and two."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale_runtime.config import QuotaConfig
from inferscale_runtime.encode.input import parse_lines
from inferscale_runtime.server.memory_api.route import MAX_BODY_BYTES


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def batch(*facts: dict[str, Any]) -> dict[str, Any]:
    return {"facts": list(facts)}


def test_the_life_of_a_fact_is_seen_by_every_replica(replica: Any) -> None:
    async def scenario() -> None:
        async with replica() as one, replica() as two:
            new = await one.put("maya/facts/dog", json={"text": "Maya has\n a dog.", "time": "May"})
            assert (new.status_code, new.json()) == (
                201,
                {"created": ["dog"], "updated": [], "unchanged": [], "version": 1},
            )
            assert new.headers["etag"] == '"v1"'
            read = await two.get("maya/facts/dog")
            fact = read.json()
            assert (fact["text"], fact["time"], fact["origin"]) == ("Maya has a dog.", "May", "api")
            assert fact["created_at"] == fact["updated_at"] != None  # noqa: E711
            assert fact["injectable"] is False
            again = await two.put("maya/facts/dog", json={"text": "Maya has a dog.", "time": "May"})
            assert again.json()["unchanged"] == ["dog"]
            other = await two.put("maya/facts/dog", json={"text": "Maya has a cat."})
            assert (other.status_code, other.json()["updated"]) == (200, ["dog"])
            assert (await one.get("maya/facts/dog")).json()["text"] == "Maya has a cat."
            gone = await one.delete("maya/facts/dog")
            assert gone.json()["deleted"] == ["dog"]
            for client in (one, two):
                missing = await client.get("maya/facts/dog")
                assert missing.status_code == 404
                assert missing.json()["error"]["param"] == "id"
                assert (await client.get("maya/facts")).json()["facts"] == []

    run(scenario())


def test_batches_pages_and_search(replica: Any) -> None:
    async def scenario() -> None:
        async with replica() as client:
            facts = [{"id": str(n), "text": "abcdefgh"[n] * 5} for n in range(8)]
            assert (await client.put("u/facts", json=batch(*facts))).json()["version"] == 1
            made = (await client.put("u/facts", json=batch({"text": "no id"}))).json()["created"]
            seen: list[str] = []
            after: str | None = None
            while True:
                params = {"limit": 4, **({"after": after} if after else {})}
                page = (await client.get("u/facts", params=params)).json()
                seen += [fact["id"] for fact in page["facts"]]
                after = page["next"]
                if after is None:
                    break
            assert seen == [*map(str, range(8)), *made]
            found = (await client.post("u/search", json={"query": "ccc", "k": 2})).json()
            assert found["facts"][0]["id"] == "2"
            assert found["facts"][0]["score"] == pytest.approx(1)
            assert len(found["facts"]) == 2
            gone = await client.delete("u/facts", params={"id": ["1", "nope", "1", "2"]})
            assert (gone.json()["deleted"], gone.json()["missing"]) == (["1", "2"], ["nope"])

    run(scenario())


@pytest.mark.parametrize(
    "user", ["../x", "..", "a/b/facts/c", "😀", "%41", "a b", "é", "x" * 512, "search", "?a#b"]
)
def test_ids_may_hold_anything_and_stay_apart(replica: Any, user: str) -> None:
    from urllib.parse import quote

    async def scenario() -> None:
        async with replica() as client:
            # httpx would resolve dots by itself: another client sends them as they are.
            path = "".join(f"%{byte:02X}" for byte in user.encode())
            fact = quote("../f/😀", safe="")
            assert (await client.put(f"{path}/facts/{fact}", json={"text": "t"})).status_code == 201
            assert (await client.get(f"{path}/facts/{fact}")).json()["id"] == "../f/😀"
            store = client.service.stores["main"].current.store
            assert list(store.users()) == [user]
            lines = (await client.get(f"{path}/export")).content.splitlines()
            assert [*parse_lines(lines, "x")] == [user]
            assert (await client.delete(path)).status_code == 200

    run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("PUT", "u/facts", {"facts": []}, 400, "facts"),
        ("PUT", "u/facts", {"facts": [{}]}, 400, "facts.0.text"),
        ("PUT", "u/facts", {"facts": [{"text": 3}]}, 400, "facts.0.text"),
        ("PUT", "u/facts", {"facts": [{"text": " \n"}]}, 400, "facts.0.text"),
        ("PUT", "u/facts", {"facts": [{"text": "\ud800"}]}, 400, "facts.0.text"),
        ("PUT", "u/facts", {"facts": [{"text": "x" * 8193}]}, 400, "facts.0.text"),
        ("PUT", "u/facts", {"facts": [{"text": "x", "id": ""}]}, 400, "facts.0.id"),
        ("PUT", "u/facts", {"facts": [{"text": "x", "id": "a\x00"}]}, 400, "facts.0.id"),
        ("PUT", "u/facts", {"facts": [{"text": "x", "id": "é" * 300}]}, 400, "facts.0.id"),
        ("PUT", "u/facts", {"facts": [{"text": "x", "turn_id": "t"}]}, 400, "facts.0.turn_id"),
        ("PUT", "u/facts", {"facts": [{"text": "x", "color": 1}]}, 400, "facts.0.color"),
        (
            "PUT",
            "u/facts",
            {"facts": [{"text": "x", "id": "1"}, {"text": "y", "id": "1"}]},
            400,
            "facts.1.id",
        ),
        ("PUT", "u/facts", b"{", 400, "body"),
        ("PUT", "u/facts", b"\xff\xfe\x00", 400, "body"),
        ("PUT", "u/facts", b"[" * 100_000, 400, "body"),
        ("PUT", "u/facts", b"x" * (MAX_BODY_BYTES + 1), 413, "body"),
        ("PUT", "u/facts/a", {"id": "b", "text": "x"}, 400, "id"),
        ("PUT", "%00/facts/a", {"text": "x"}, 400, "user"),
        ("PUT", "%FF/facts/a", {"text": "x"}, 400, "user"),
        ("PUT", f"{'x' * 513}/facts/a", {"text": "x"}, 400, "user"),
        ("PUT", f"{'x' * 60_000}/facts/a", {"text": "x"}, 400, "user"),
        ("PUT", "u/facts/%00", {"text": "x"}, 400, "id"),
        ("GET", "nobody/facts", None, 404, "user"),
        ("GET", "nobody/facts/1", None, 404, "user"),
        ("GET", "nobody/export", None, 404, "user"),
        ("POST", "nobody/search", {"query": "x"}, 404, "user"),
        ("DELETE", "nobody", None, 404, "user"),
        ("DELETE", "nobody/facts/1", None, 404, "user"),
        ("DELETE", "known/facts/none", None, 404, "id"),
        ("DELETE", "known/facts", None, 400, "id"),
        ("GET", "known/facts?limit=0", None, 400, "limit"),
        ("GET", "known/facts?limit=x", None, 400, "limit"),
        ("GET", "known/facts?after=none", None, 400, "after"),
        ("GET", "known/facts?store=other", None, 404, "store"),
        ("POST", "known/search", {"query": "x", "k": True}, 400, "k"),
        ("POST", "known/search", {"query": ""}, 400, "query"),
    ],
)
def test_bad_input_names_its_field(
    replica: Any, method: str, path: str, body: Any, status: int, param: str
) -> None:
    async def scenario() -> None:
        async with replica() as client:
            await client.put("known/facts/1", json={"text": "x"})
            if isinstance(body, bytes):
                sent = {"content": body, "headers": {"content-type": "application/json"}}
            elif body is None:
                sent = {}
            else:
                sent = {
                    "content": json.dumps(body),
                    "headers": {"content-type": "application/json"},
                }
            answer = await client.request(method, path, **sent)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (status, param, status)
            assert param in error["message"]
            assert len(answer.content) < 1000

    run(scenario())


def test_conditions(replica: Any) -> None:
    async def scenario() -> None:
        async with replica() as client:
            text = {"json": {"text": "x"}}
            only_new = {"headers": {"if-none-match": "*"}}
            assert (await client.put("u/facts/1", **text, **only_new)).status_code == 201
            there = await client.put("u/facts/1", json={"text": "y"}, **only_new)
            assert (there.status_code, there.json()["error"]["param"]) == (412, "If-None-Match")
            assert (await client.put("u/facts/2", **text, **only_new)).status_code == 201
            tag = (await client.get("u/facts")).headers["etag"]
            same = await client.get("u/facts", headers={"if-none-match": tag})
            assert (same.status_code, same.content) == (304, b"")
            old = {"headers": {"if-match": '"v1"'}}
            for answer in (
                await client.put("u/facts/3", **text, **old),
                await client.put("u/facts", json=batch({"text": "z"}), **old),
                await client.delete("u/facts/1", **old),
            ):
                assert answer.status_code == 412
                assert answer.json()["error"]["param"] == "If-Match"
            fresh = {"headers": {"if-match": tag}}
            assert (await client.delete("u/facts/1", **fresh)).status_code == 200
            wrong = await client.put("u/facts/1", **text, headers={"if-match": "v2"})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "If-Match")

    run(scenario())


def test_a_repeated_request_is_carried_out_once(replica: Any) -> None:
    async def scenario() -> None:
        async with replica() as one, replica() as two:
            key = {"idempotency-key": "abc"}
            sends = [one.put("u/facts", json=batch({"text": "x"}), headers=key) for _ in range(5)]
            answers = await asyncio.gather(*sends)
            assert len({answer.content for answer in answers}) == 1
            assert answers[0].json()["version"] == 1
            other = await one.put("u/facts", json=batch({"text": "y"}), headers=key)
            assert (other.status_code, other.json()["error"]["param"]) == (422, "Idempotency-Key")
            # Another replica carries it out again, and changes nothing.
            repeated = await two.put("u/facts", json=batch({"text": "x"}), headers=key)
            assert repeated.json()["unchanged"] == answers[0].json()["created"]
            assert repeated.json()["version"] == 1
            # A failure is not remembered.
            assert (await one.delete("u/facts/late", headers=key)).status_code == 404
            await one.put("u/facts/late", json={"text": "z"})
            assert (await one.delete("u/facts/late", headers=key)).status_code == 200
            assert (await one.delete("u/facts/late", headers=key)).status_code == 200

    run(scenario())


def test_concurrent_writers_lose_nothing(replica: Any) -> None:
    async def scenario() -> None:
        async with replica() as one, replica() as two:
            sends = [
                client.put(f"u/facts/{n}-{name}", json={"text": f"fact {n} {name}"})
                for n in range(15)
                for name, client in (("one", one), ("two", two))
            ]
            assert {answer.status_code for answer in await asyncio.gather(*sends)} == {201}
            facts = (await one.get("u/facts", params={"limit": 100})).json()["facts"]
            assert len({fact["id"] for fact in facts}) == 30

    run(scenario())


def test_the_quota_and_read_only_stores(replica: Any) -> None:
    async def scenario() -> None:
        async with replica(quota=QuotaConfig(max_facts_per_user=2)) as client:
            full = batch({"text": "a"}, {"text": "b"})
            assert (await client.put("u/facts", json=full)).status_code == 200
            more = await client.put("u/facts", json=batch({"text": "c"}))
            assert (more.status_code, more.json()["error"]["param"]) == (403, "facts")
            assert len((await client.get("u/facts")).json()["facts"]) == 2

    run(scenario())


def test_stores_are_named_or_the_first_writable_one(replica: Any) -> None:
    async def scenario() -> None:
        async with replica("a", "b") as client:
            entry = client.service.stores["a"].current.entry
            object.__setattr__(entry, "writable", False)
            served = client.service.stores["a"]
            served.entry = entry
            assert (await client.put("u/facts/1", json={"text": "x"})).status_code == 201
            assert (await client.get("u/facts", params={"store": "b"})).status_code == 200
            assert (await client.get("u/facts", params={"store": "a"})).status_code == 404
            refused = await client.put("u/facts/1", params={"store": "a"}, json={"text": "x"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (403, "store")

    run(scenario())


def test_erasing_a_user_leaves_nothing_anywhere(replica: Any, kit: SimpleNamespace) -> None:
    async def scenario() -> None:
        async with replica() as client:
            service = client.service
            opened = service.stores["main"].current
            kit.commit(opened.store, "u", ["red", "green"])
            await client.put("other/facts/1", json={"text": "x"})
            view = opened.users.get("u", kit.FINGERPRINT)
            opened.staging.read("u", view, list(view.segments.values()))
            keys = [segment.key for segment in view.segments.values()]
            assert service.arena.resident(keys) == {*keys}
            receipt = (await client.delete("u")).json()
            assert receipt["files"] >= 3
            assert len(receipt["digests"]) == receipt["files"]
            assert (
                receipt["arena_bytes"]
                == sum(segment.num_tokens for segment in view.segments.values())
                * service.arena.row_bytes
            )
            assert service.arena.resident(keys) == set()
            assert opened.store.leftovers("u") == []
            assert (await client.get("u/facts")).status_code == 404
            assert (await client.delete("u")).status_code == 404
            assert (await client.get("other/facts")).status_code == 200

    run(scenario())


def test_a_deleted_fact_and_what_read_it_leave_the_arena(
    replica: Any, kit: SimpleNamespace
) -> None:
    async def scenario() -> None:
        async with replica() as client:
            service = client.service
            opened = service.stores["main"].current
            kit.commit(opened.store, "u", ["red", "green"])
            view = opened.users.get("u", kit.FINGERPRINT)
            opened.staging.read("u", view, list(view.segments.values()))
            await client.delete("u/facts/0")
            kept = {view.segments["1"].key}
            assert service.arena.resident([s.key for s in view.segments.values()]) == kept
            assert (await client.get("u/facts/1")).json()["injectable"] is True

    run(scenario())
