from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferscale_operator.desired.kinds import CLAIM, POD
from inferscale_operator.local.controllers import ClaimBinder
from inferscale_operator.local.memory_cluster import MemoryCluster
from inferscale_operator.local.volumes import FOLDER_ANNOTATION, VolumeFolders

pytestmark = pytest.mark.asyncio


def claim(name: str, **annotations: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": "ns", "annotations": annotations},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }


async def delete(cluster: MemoryCluster, live: dict[str, Any]) -> None:
    await cluster.delete(CLAIM, "ns", live["metadata"]["name"], live["metadata"]["uid"])


async def test_a_claim_is_bound_and_its_folder_goes_with_it(tmp_path: Path) -> None:
    cluster, folders = MemoryCluster(), VolumeFolders(tmp_path, tmp_path)
    binder = ClaimBinder(cluster, folders)
    live = await cluster.create(claim("c"))
    await binder.sync()
    bound = await cluster.get(CLAIM, "ns", "c")
    assert bound is not None
    assert bound["status"]["phase"] == "Bound"
    assert bound["status"]["capacity"] == {"storage": "1Gi"}
    assert folders.claim(live).is_dir()
    await delete(cluster, live)
    await binder.sync()
    assert not folders.claim(live).exists()


async def test_a_folder_stays_while_a_pod_uses_it(tmp_path: Path) -> None:
    cluster, folders = MemoryCluster(), VolumeFolders(tmp_path, tmp_path)
    binder = ClaimBinder(cluster, folders)
    live = await cluster.create(claim("c"))
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": "c"}}
    pod = await cluster.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "p", "namespace": "ns"},
            "spec": {"containers": [], "volumes": [volume]},
        }
    )
    await binder.sync()
    await delete(cluster, live)
    await binder.sync()
    assert folders.claim(live).is_dir()
    await cluster.delete(POD, "ns", "p", pod["metadata"]["uid"])
    await binder.sync()
    assert not folders.claim(live).exists()


async def test_a_folder_that_was_named_or_never_seen_is_not_removed(tmp_path: Path) -> None:
    cluster, folders = MemoryCluster(), VolumeFolders(tmp_path / "data", tmp_path)
    mine = tmp_path / "mine"
    live = await cluster.create(claim("c", **{FOLDER_ANNOTATION: str(mine)}))
    unknown = folders.data / "volumes/ns/unknown"
    unknown.mkdir(parents=True)
    binder = ClaimBinder(cluster, folders)
    await binder.sync()
    await delete(cluster, live)
    await binder.sync()
    assert mine.is_dir()
    assert unknown.is_dir()
