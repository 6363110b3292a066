from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from inferscale_operator.cluster.errors import AlreadyExistsError, ConflictError, InvalidError
from inferscale_operator.desired.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    MEMORY_STORE,
    NAMESPACE,
    POD_MONITOR,
    SERVICE,
)
from inferscale_operator.local import state_file
from inferscale_operator.local.memory_cluster import Change, MemoryCluster, counted_uids

pytestmark = pytest.mark.asyncio


def make_cluster() -> MemoryCluster:
    return MemoryCluster(clock=lambda: datetime(2026, 1, 2, tzinfo=UTC), uids=counted_uids())


def config(name: str, **extra: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", **extra.pop("metadata", {})}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **extra}


def deployment(**spec: Any) -> dict[str, Any]:
    metadata = {"name": "d", "namespace": "ns"}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def owned_by(owner: dict[str, Any]) -> dict[str, Any]:
    return {"ownerReferences": [{"kind": "X", "name": "x", "uid": owner["metadata"]["uid"]}]}


async def test_create_fills_in_what_an_api_server_fills_in() -> None:
    cluster = make_cluster()
    live = await cluster.create(deployment(replicas=1) | {"status": {"replicas": 9}})
    assert live["metadata"]["uid"] == "00000000-0000-4000-8000-000000000001"
    assert live["metadata"]["generation"] == 1
    assert live["metadata"]["creationTimestamp"] == "2026-01-02T00:00:00Z"
    assert "status" not in live
    assert await cluster.get(DEPLOYMENT, "ns", "d") == live
    with pytest.raises(AlreadyExistsError, match="Deployment ns/d"):
        await cluster.create(deployment())


async def test_generation_counts_changes_of_the_spec_only() -> None:
    cluster = make_cluster()
    live = await cluster.apply(deployment(replicas=1))
    with_status = await cluster.patch_status(live, {"replicas": 1})
    assert with_status["metadata"]["generation"] == 1
    assert with_status["metadata"]["resourceVersion"] != live["metadata"]["resourceVersion"]
    again = await cluster.apply(deployment(replicas=1))
    assert again == with_status
    changed = await cluster.apply(deployment(replicas=2))
    assert changed["metadata"]["generation"] == 2
    assert changed["status"] == {"replicas": 1}


async def test_apply_removes_what_the_same_manager_no_longer_sets_and_keeps_others_fields() -> None:
    cluster = make_cluster()
    await cluster.apply(config("c", data={"a": "1", "b": "2"}))
    await cluster.apply(config("c", data={"x": "9"}), manager="other")
    live = await cluster.apply(config("c", data={"a": "3"}))
    assert live["data"] == {"a": "3", "x": "9"}
    live = await cluster.apply(config("c"), manager="other")
    assert live["data"] == {"a": "3"}
    live = await cluster.apply(config("c"))
    assert "data" not in live


async def test_apply_with_a_uid_does_not_make_a_deleted_object_again() -> None:
    cluster = make_cluster()
    with pytest.raises(ConflictError, match="does not exist"):
        await cluster.apply(config("c", metadata={"uid": "u"}))
    assert await cluster.list(CONFIG_MAP) == []


async def test_status_of_an_old_version_is_a_conflict() -> None:
    cluster = make_cluster()
    old = await cluster.create(deployment(replicas=1))
    await cluster.patch_status(old, {"replicas": 1})
    with pytest.raises(ConflictError, match="resourceVersion"):
        await cluster.patch_status(old, {"replicas": 2})
    with pytest.raises(ConflictError, match="resourceVersion"):
        await cluster.set_finalizer(old, "f", present=True)


async def test_a_finalizer_holds_a_deleted_object_and_its_dependents() -> None:
    cluster = make_cluster()
    owner = await cluster.create(deployment(replicas=1))
    owner = await cluster.set_finalizer(owner, "f", present=True)
    await cluster.create(config("child", metadata=owned_by(owner)))
    await cluster.delete(DEPLOYMENT, "ns", "d", owner["metadata"]["uid"])
    live = await cluster.get(DEPLOYMENT, "ns", "d")
    assert live is not None
    assert live["metadata"]["deletionTimestamp"]
    assert len(await cluster.list(CONFIG_MAP)) == 1
    with pytest.raises(InvalidError):
        await cluster.set_finalizer(live, "g", present=True)
    await cluster.set_finalizer(live, "f", present=False)
    assert await cluster.get(DEPLOYMENT, "ns", "d") is None
    assert await cluster.list(CONFIG_MAP) == []


async def test_a_dependent_with_another_owner_stays_and_an_orphan_is_collected() -> None:
    cluster = make_cluster()
    first = await cluster.create(config("first"))
    second = await cluster.create(config("second"))
    both = owned_by(first)["ownerReferences"] + owned_by(second)["ownerReferences"]
    await cluster.create(config("child", metadata={"ownerReferences": both}))
    await cluster.delete(CONFIG_MAP, "ns", "first", first["metadata"]["uid"])
    assert await cluster.get(CONFIG_MAP, "ns", "child") is not None
    await cluster.create(config("late", metadata=owned_by(first)))
    assert await cluster.get(CONFIG_MAP, "ns", "late") is None


async def test_delete_of_another_uid_does_nothing() -> None:
    cluster = make_cluster()
    await cluster.create(config("c"))
    await cluster.delete(CONFIG_MAP, "ns", "c", "another")
    assert await cluster.get(CONFIG_MAP, "ns", "c") is not None


async def test_list_by_namespace_and_labels() -> None:
    cluster = make_cluster()
    for name, label in (("b", "1"), ("a", "1"), ("c", "2")):
        await cluster.create(config(name, metadata={"labels": {"l": label}}))
    await cluster.create(config("a", metadata={"namespace": "other", "labels": {"l": "1"}}))
    found = await cluster.list(CONFIG_MAP, "ns", {"l": "1"})
    assert [item["metadata"]["name"] for item in found] == ["a", "b"]
    assert len(await cluster.list(CONFIG_MAP, labels={"l": "1"})) == 3
    assert await cluster.list(SERVICE) == []


async def test_watchers_hear_each_change_once_and_get_copies() -> None:
    cluster = make_cluster()
    queue = cluster.subscribe()
    live = await cluster.apply(config("c", data={"a": "1"}))
    await cluster.apply(config("c", data={"a": "1"}))
    await cluster.apply(config("c", data={"a": "2"}))
    await cluster.delete(CONFIG_MAP, "ns", "c", live["metadata"]["uid"])
    changes: list[Change] = [queue.get_nowait() for _ in range(queue.qsize())]
    assert [change.type for change in changes] == ["ADDED", "MODIFIED", "DELETED"]
    changes[0].object["data"]["a"] = "spoiled"
    assert changes[1].object["data"] == {"a": "2"}
    with pytest.raises(asyncio.QueueEmpty):
        queue.get_nowait()


async def test_what_is_returned_is_a_copy() -> None:
    cluster = make_cluster()
    live = await cluster.create(config("c", data={"a": "1"}))
    live["data"]["a"] = "spoiled"
    assert (await cluster.list(CONFIG_MAP))[0]["data"] == {"a": "1"}


async def test_a_second_cluster_goes_on_where_the_first_was(tmp_path: Any) -> None:
    cluster = make_cluster()
    await cluster.apply(config("c", data={"a": "1", "b": "1"}))
    path = tmp_path / "state.json"
    state_file.save_state(path, cluster.dump())
    assert path.stat().st_mode & 0o777 == 0o600
    other = make_cluster()
    state = state_file.load_state(path)
    assert state is not None
    other.load(state)
    assert other.dump() == cluster.dump()
    live = await other.apply(config("c", data={"a": "1"}))
    assert live["data"] == {"a": "1"}
    assert int(live["metadata"]["resourceVersion"]) > 1


async def test_a_damaged_state_file_is_named(tmp_path: Any) -> None:
    path = tmp_path / "state.json"
    assert state_file.load_state(path) is None
    path.write_text("{")
    with pytest.raises(state_file.StateError, match=r"state\.json"):
        state_file.load_state(path)
    path.write_text('{"format": 99}')
    with pytest.raises(state_file.StateError, match="format 1"):
        state_file.load_state(path)


async def test_namespaces_and_kinds() -> None:
    cluster = make_cluster()
    namespace = await cluster.get(NAMESPACE, None, "any")
    assert namespace is not None
    assert namespace["status"]["phase"] == "Active"
    assert await cluster.knows(MEMORY_STORE)
    assert not await cluster.knows(POD_MONITOR)
    assert await MemoryCluster(optional_kinds=["PodMonitor"]).knows(POD_MONITOR)
