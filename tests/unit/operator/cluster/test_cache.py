from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from inferscale_operator.cluster.cache import ChildCache, owner_of
from inferscale_operator.desired.kinds import CONFIG_MAP, SECRET
from inferscale_operator.desired.naming import owner_labels

STORE = {"kind": "MemoryStore", "metadata": {"name": "m", "namespace": "ns"}}
OWNER = ("MemoryStore", "ns", "m")


def child(name: str = "c", version: int = 1, uid: str = "u1", **more: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": owner_labels(STORE),
        "managedFields": [{"manager": "x"}],
    }
    return {"metadata": metadata, **more}


def test_children_are_found_by_owner_without_managed_fields() -> None:
    cache = ChildCache()
    assert cache.update(CONFIG_MAP, child(data={"a": "1"})) == OWNER
    (found,) = cache.children(OWNER).values()
    assert found["kind"] == "ConfigMap"
    assert found["apiVersion"] == "v1"
    assert found["data"] == {"a": "1"}
    assert "managedFields" not in found["metadata"]
    assert cache.children(("MemoryStore", "ns", "other")) == {}


def test_object_without_our_labels_is_not_taken_in() -> None:
    cache = ChildCache()
    manifest = child()
    manifest["metadata"]["labels"] = {"app": "x"}
    assert owner_of(manifest) is None
    assert cache.update(CONFIG_MAP, manifest) is None
    assert len(cache) == 0


def test_older_versions_are_no_news() -> None:
    cache = ChildCache()
    cache.update(CONFIG_MAP, child(version=5, data={"a": "new"}))
    assert cache.update(CONFIG_MAP, child(version=5)) is None
    assert cache.update(CONFIG_MAP, child(version=4, data={"a": "old"})) is None
    assert cache.children(OWNER)["ConfigMap", "c"]["data"] == {"a": "new"}


def test_write_answered_after_the_deletion_was_heard_brings_nothing_back() -> None:
    cache = ChildCache()
    cache.update(CONFIG_MAP, child(version=5))
    assert cache.remove(CONFIG_MAP, "ns", "c", "u1", 7) == OWNER
    assert cache.update(CONFIG_MAP, child(version=6)) is None
    assert len(cache) == 0


def test_object_that_lost_and_got_back_its_label_comes_back() -> None:
    cache = ChildCache()
    cache.update(CONFIG_MAP, child(version=5), heard=True)
    cache.remove(CONFIG_MAP, "ns", "c", "u1", 6)
    assert cache.update(CONFIG_MAP, child(version=7)) == OWNER


def test_deletion_of_a_former_object_of_the_name_is_ignored() -> None:
    cache = ChildCache()
    cache.update(CONFIG_MAP, child(version=5, uid="new"))
    assert cache.remove(CONFIG_MAP, "ns", "c", "old", 4) is None
    assert cache.has(CONFIG_MAP, "ns", "c")


def test_list_removes_what_it_does_not_have_but_nothing_newer() -> None:
    cache = ChildCache()
    cache.update(CONFIG_MAP, child("old", 5, "u1"))
    cache.update(CONFIG_MAP, child("kept", 6, "u2"))
    cache.update(CONFIG_MAP, child("young", 12, "u3"))
    comparison = cache.compare(CONFIG_MAP, None)
    comparison.page([child("kept", 6, "u2")])
    assert comparison.finish(10).owners == {OWNER}
    assert {name for _, name in cache.children(OWNER)} == {"kept", "young"}


def test_list_of_one_namespace_leaves_others_alone() -> None:
    cache = ChildCache()
    cache.update(CONFIG_MAP, child())
    assert cache.compare(CONFIG_MAP, "elsewhere").finish(10).owners == frozenset()
    assert len(cache) == 1


def test_unheard_are_those_whose_listed_state_the_watch_did_not_tell() -> None:
    cache = ChildCache()
    cache.update(CONFIG_MAP, child("told", 5, "u1"), heard=True)
    cache.update(CONFIG_MAP, child("own", 6, "u2"))
    comparison = cache.compare(CONFIG_MAP, None)
    comparison.page([child("told", 5, "u1"), child("own", 6, "u2"), child("new", 7, "u3")])
    found = comparison.finish(9)
    assert found.unheard == {("ns", "own", "u2"): 6, ("ns", "new", "u3"): 7}
    cache.update(CONFIG_MAP, child("own", 6, "u2"), heard=True)
    assert cache.heard(CONFIG_MAP, "ns", "own", "u2") == 6


def test_secret_values_are_not_kept() -> None:
    cache = ChildCache()
    cache.update(SECRET, child(data={"api-key": "c2VjcmV0"}, stringData={"x": "plain"}))
    (entry,) = cache._entries.values()
    assert b"c2VjcmV0" not in entry.data
    assert b"plain" not in entry.data
    assert cache.children(OWNER)["Secret", "c"]["data"] == {"api-key": ""}


@given(st.permutations([("set", 1), ("set", 2), ("set", 3), ("set", 5), ("gone", 4)]))
def test_order_of_events_does_not_matter(steps: list[tuple[str, int]]) -> None:
    cache = ChildCache()
    for action, version in steps:
        if action == "set":
            cache.update(CONFIG_MAP, child(version=version, data={"v": str(version)}))
        else:
            cache.remove(CONFIG_MAP, "ns", "c", "u1", version)
    assert cache.children(OWNER)["ConfigMap", "c"]["data"] == {"v": "5"}
