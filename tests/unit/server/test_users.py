"""What another replica wrote or erased leaves this one's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferscale_runtime.config import QuotaConfig
from inferscale_runtime.errors import StoreError
from inferscale_runtime.server import metrics, users
from inferscale_runtime.server.stores import OpenStore
from inferscale_runtime.server.users import UserView
from inferscale_runtime.store import living


@pytest.fixture
def world(tmp_path: Path, kit: Any) -> Any:
    world = kit.World(tmp_path)
    store = world.store("a")
    kit.add_encoding(store)
    for user in ("ann", "bob"):
        kit.commit(store, user, [f"{user} sings", f"{user} dives"])
    return world


def opened(world: Any) -> OpenStore:
    current = world.service("a").stores["a"].current
    assert current is not None
    return current


def loaded(current: OpenStore, user: str) -> tuple[UserView, dict[str, str]]:
    """A user's view with all of its segments in the arena, and their keys by fact."""
    view = current.users.get(user, current.identity.fingerprint)
    assert view is not None
    current.staging.read(user, view, list(view.segments.values()))
    return view, {identity: segment.key for identity, segment in view.segments.items()}


def test_the_arena_forgets_what_another_replica_changed_or_deleted(world: Any) -> None:
    current = opened(world)
    before, ann = loaded(current, "ann")
    _, bob = loaded(current, "bob")
    other = world.store("a")
    living.delete_facts(other, "ann", ["0"])
    assert world.arena.resident([*ann.values()]) == {*ann.values()}, "until it is noticed"
    view = current.users.get("ann", current.identity.fingerprint)
    assert view is not None
    assert view.memory.epoch == before.memory.epoch + 1
    assert [fact.id for fact in view.memory.facts] == ["1"]
    assert world.arena.resident([*ann.values()]) == {ann["1"]}
    living.put_facts(
        other, "ann", [living.FactWrite("1", "ann rests")], origin="api", embedder="toy",
        embed=world.load_embedder("toy").embed, limits=QuotaConfig(),
    )  # fmt: skip
    assert current.users.get("ann", current.identity.fingerprint) is not view
    assert world.arena.resident([*ann.values(), *bob.values()]) == {*bob.values()}


@pytest.mark.parametrize("asked", [True, False])
def test_an_erased_user_leaves_the_arena_whether_anybody_asks_or_not(
    world: Any, asked: bool
) -> None:
    service = world.service("a")
    current = service.stores["a"].current
    _, ann = loaded(current, "ann")
    _, bob = loaded(current, "bob")
    world.store("a").remove_user("ann")
    if asked:
        assert current.users.get("ann", current.identity.fingerprint) is None
    else:
        service.stores["a"].sweep()
    assert world.arena.resident([*ann.values(), *bob.values()]) == {*bob.values()}


def test_a_user_that_came_back_at_the_same_version_is_read_anew(world: Any, kit: Any) -> None:
    current = opened(world)
    loaded(current, "ann")
    other = world.store("a")
    other.remove_user("ann")
    kit.commit(other, "ann", ["ann is somebody else"])
    view = current.users.get("ann", current.identity.fingerprint)
    assert view is not None
    assert view.memory.version == 1
    assert [fact.text for fact in view.memory.facts] == ["ann is somebody else"]


def test_a_segment_that_went_while_it_was_read_does_not_stay(world: Any) -> None:
    current = opened(world)
    view = current.users.get("ann", current.identity.fingerprint)
    assert view is not None
    segments = list(view.segments.values())
    found = [
        replace(source, sent=source.data())
        for source in current.store.find_segments("ann", segments)
    ]
    living.delete_facts(world.store("a"), "ann", ["0", "1"])
    current.users.sweep()
    current.store.find_segments = lambda *_: found  # type: ignore[method-assign]
    current.staging.read("ann", view, segments)
    assert world.arena.resident([segment.key for segment in segments]) == set()


def test_files_that_were_replaced_while_they_were_read_are_not_damaged(world: Any) -> None:
    current = opened(world)
    view = current.users.get("ann", current.identity.fingerprint)
    assert view is not None
    left = view.segments["1"]
    living.delete_facts(world.store("a"), "ann", ["0"])  # rewrites the file of both

    def counted(reason: str) -> float:
        return float(metrics.UNUSABLE_SEGMENTS.labels(reason)._value.get())

    before = counted("damaged"), counted("missing")
    assert current.staging.read("ann", view, [left]) is None
    assert (counted("damaged"), counted("missing")) == (before[0], before[1] + 1)
    assert view.damaged == set()
    view = current.users.get("ann", current.identity.fingerprint)
    assert view is not None
    assert current.staging.read("ann", view, [view.segments["1"]]) is None
    assert world.arena.resident([view.segments["1"].key]) == {view.segments["1"].key}


def test_users_that_are_no_longer_watched_leave_the_arena(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "MAX_CACHED_USERS", 1)
    current = opened(world)
    _, ann = loaded(current, "ann")
    _, bob = loaded(current, "bob")
    assert world.arena.resident([*ann.values(), *bob.values()]) == {*bob.values()}


def test_a_store_that_does_not_answer_is_looked_through_later(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = world.service("a").stores["a"]
    assert served.current is not None
    _, ann = loaded(served.current, "ann")
    world.store("a").remove_user("ann")

    def away(user: str) -> None:
        raise StoreError("away")

    with monkeypatch.context() as patch:
        patch.setattr(served.current.store, "manifest_mark", away)
        served.sweep()
    assert world.arena.resident([*ann.values()]) == {*ann.values()}
    served.sweep()
    assert world.arena.resident([*ann.values()]) == set()
