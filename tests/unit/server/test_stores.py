"""Several stores behind one server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from inferscale_runtime.errors import StoreError
from inferscale_runtime.server.options import MemoryOptions
from inferscale_runtime.server.service import MemoryService, Prepared, UnknownUserError
from inferscale_runtime.server.stores import UnknownStoreError


def ask(service: MemoryService, user: str, **options: Any) -> Prepared:
    messages = [{"role": "user", "content": options.pop("question", "hello")}]
    chosen = MemoryOptions(user=user, **options)
    return asyncio.run(service.prepare(chosen, messages, {"add_generation_prompt": True}, None))


def prompt(prepared: Prepared) -> str:
    assert prepared.token_ids is not None
    return "".join(map(chr, prepared.token_ids))


@pytest.fixture
def two(world: Any, kit: Any) -> MemoryService:
    """Store ``a`` has ann and both; ``b`` has bob and both, with another heading."""
    a, b = world.store("a"), world.store("b")
    kit.add_encoding(a, heading="Facts of a:")
    kit.add_encoding(b, heading="Facts of b:")
    kit.commit(a, "ann", ["ann sings"])
    kit.commit(a, "both", ["both, the same fact", "said in a"])
    kit.commit(b, "both", ["both, the same fact", "said in b"])
    kit.commit(b, "bob", ["bob dives"])
    service: MemoryService = world.service("a", "b")
    return service


def test_each_store_has_its_own_prompt_texts(two: MemoryService) -> None:
    assert prompt(ask(two, "ann")).startswith("<system>Facts of a:- ann sings")
    assert prompt(ask(two, "bob")).startswith("<system>Facts of b:- bob dives")
    for user, store in (("ann", "a"), ("bob", "b")):
        usage = ask(two, user).usage
        assert (usage.mode, usage.store, usage.reason) == ("injected", store, None)


def test_the_first_that_has_the_user_unless_one_is_named(two: MemoryService) -> None:
    assert ask(two, "both").usage.store == "a"
    assert ask(two, "both", store="b").usage.store == "b"
    assert "said in b" in prompt(ask(two, "both", store="b"))
    assert ask(two, "ann", store="b").usage.mode == "none"


def test_salts_leases_and_segments_hold_the_store(two: MemoryService) -> None:
    """The same fact of the same user has the same key in both stores."""
    first, second = (
        ask(two, "both", store=store, k=1, question="the same fact, both") for store in "ab"
    )
    assert "the same fact" in prompt(first)
    assert "the same fact" in prompt(second)
    assert first.lease is not None
    assert second.lease is not None
    assert not set(first.lease.keys) & set(second.lease.keys)
    assert not set(first.lease.runs) & set(second.lease.runs)
    assert first.salt != second.salt
    plain = [ask(two, "both", store=store, k=0).salt for store in "ab"]
    assert plain[0] != plain[1]
    texts = [ask(two, "both", store=store, mode="text").salt for store in "ab"]
    assert len({first.salt, second.salt, *plain, *texts}) == 6


def test_an_unknown_store_lists_the_known_ones(two: MemoryService) -> None:
    with pytest.raises(UnknownStoreError) as caught:
        ask(two, "ann", store="c")
    assert caught.value.known == ("a", "b")


def test_unknown_users(two: MemoryService, world: Any) -> None:
    usage = ask(two, "nobody").usage
    assert (usage.mode, usage.store, usage.reason) == ("none", None, None)
    strict = world.service("a", "b", retrieval={"unknown_user": "error"})
    with pytest.raises(UnknownUserError):
        ask(strict, "nobody")


def test_a_store_that_cannot_be_opened_takes_nothing_from_the_others(world: Any, kit: Any) -> None:
    b = world.store("b")
    kit.add_encoding(b)
    kit.commit(b, "bob", ["bob dives"])
    (Path(world.url("a"))).mkdir()
    service = world.service("a", "b")
    assert service.stores["a"].reason == "store_unreadable"
    assert ask(service, "bob").usage.mode == "injected"
    usage = ask(service, "nobody").usage
    assert (usage.mode, usage.reason) == ("none", "store_unreadable")
    assert ask(service, "nobody", store="b").usage.reason is None
    strict = world.service("a", "b", retrieval={"unknown_user": "error"})
    with pytest.raises(StoreError):
        ask(strict, "nobody")
    # It comes later.
    a = world.store("a")
    kit.add_encoding(a)
    kit.commit(a, "ann", ["ann sings"])
    assert not service.settled
    service.refresh()
    assert service.settled
    assert ask(service, "ann").usage.mode == "injected"


def test_a_damaged_user_is_looked_for_in_the_other_store(two: MemoryService, world: Any) -> None:
    for manifest in Path(world.url("a")).glob("users/*/manifest.json"):
        manifest.write_text("damaged")
    assert ask(two, "both").usage.store == "b"
    with pytest.raises(StoreError):
        ask(two, "ann")
    with pytest.raises(StoreError):
        ask(two, "both", store="a")


def test_a_storage_that_stopped_answering_is_passed_over(
    two: MemoryService, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = two.stores["a"].current
    assert current is not None
    asked = []

    def get(user: str, fingerprint: str) -> None:
        asked.append(user)
        raise ConnectionResetError("signed with topsecret")

    monkeypatch.setattr(current.users, "get", get)
    assert ask(two, "bob").usage.store == "b"
    assert ask(two, "bob").usage.store == "b"
    assert len(asked) == 1, "not waited for again"
    usage = ask(two, "nobody").usage
    assert (usage.mode, usage.reason) == ("none", "store_unreadable")
    with pytest.raises(StoreError, match="store 'a' does not answer"):
        ask(two, "ann", store="a")
    monkeypatch.undo()
    monkeypatch.setattr("inferscale_runtime.server.stores.time.monotonic", lambda: 1e12)
    assert ask(two, "ann").usage.store == "a"


def test_a_store_without_encoding_goes_as_text(world: Any, kit: Any) -> None:
    a, b = world.store("a"), world.store("b")
    kit.commit(a, "ann", ["ann sings"])
    kit.add_encoding(b)
    service = world.service("a", "b")
    usage = ask(service, "ann").usage
    assert (usage.mode, usage.reason, usage.store) == ("text", "not_encoded", "a")
    kit.add_encoding(a)
    service.refresh()
    assert ask(service, "ann").usage.mode == "injected"


def test_only_the_pinned_fingerprint_is_adopted(world: Any, kit: Any) -> None:
    world.own = [kit.FINGERPRINT, kit.OTHER]
    a = world.store("a")
    kit.add_encoding(a, kit.FINGERPRINT, heading="New texts:")
    kit.commit(a, "ann", ["ann sings"], fingerprints=[kit.FINGERPRINT, kit.OTHER])
    service = world.service("a", pins={"a": kit.OTHER})
    assert service.stores["a"].reason == "expected_fingerprint_missing"
    usage = ask(service, "ann").usage
    assert (usage.mode, usage.reason) == ("text", "expected_fingerprint_missing")
    kit.add_encoding(a, kit.OTHER, heading="Old texts:")
    service.refresh()
    assert service.stores["a"].reason is None
    assert prompt(ask(service, "ann")).startswith("<system>Old texts:")


def test_an_adopted_encoding_stays_whatever_comes(world: Any, kit: Any) -> None:
    world.own = [kit.FINGERPRINT, kit.OTHER]
    a = world.store("a")
    kit.add_encoding(a, kit.OTHER, heading="Old texts:")
    kit.commit(a, "ann", ["ann sings"], fingerprints=[kit.OTHER])
    service = world.service("a")
    kit.add_encoding(a, kit.FINGERPRINT, heading="New texts:")
    service.refresh()
    assert prompt(ask(service, "ann")).startswith("<system>Old texts:")


def test_one_embedder_for_each_name(world: Any, kit: Any) -> None:
    for name, embedder in (("a", "toy"), ("b", "toy"), ("c", "other")):
        kit.add_encoding(world.store(name), embedder=embedder)
    service = world.service("a", "b", "c")
    assert world.loads == ["toy", "other"]
    current = {name: served.current for name, served in service.stores.items()}
    assert current["a"].questions is current["b"].questions
    assert current["a"].questions is not current["c"].questions


def test_a_broken_embedder_is_told_and_tried_again(world: Any, kit: Any) -> None:
    a = world.store("a")
    kit.add_encoding(a, embedder="toy")
    kit.commit(a, "ann", ["ann sings", "ann dives"])
    world.broken_embedders = {"toy"}
    service = world.service("a")
    assert "broken" in (service.stores["a"].embedder_problem or "")
    # The newest facts meanwhile, injected.
    prepared = ask(service, "ann", k=1, question="ann sings")
    assert prepared.usage.mode == "injected"
    assert "ann dives" in prompt(prepared)
    world.broken_embedders = set()
    service.refresh()
    assert service.settled
    assert "ann sings" in prompt(ask(service, "ann", k=1, question="ann sings"))


def test_a_preamble_that_does_not_fit_is_said(tmp_path: Path, kit: Any) -> None:
    world = kit.World(tmp_path, num_rows=4)
    kit.add_encoding(world.store("a"))
    with pytest.raises(StoreError, match=r"tiers\.dram_bytes"):
        world.service("a")
