from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferscale_operator.desired.kinds import Kind
from inferscale_operator.local.environment import MissingError
from inferscale_operator.local.volumes import FOLDER_ANNOTATION, VolumeFolders, memory_folder

OBJECTS: dict[tuple[str, str], dict[str, Any]] = {
    ("ConfigMap", "c"): {
        "data": {"config.json": '{"store": "/store/a"}', "facts.jsonl": '"/store"'}
    },
    ("Secret", "s"): {"stringData": {"token": "top", "other": "x"}},
    ("PersistentVolumeClaim", "mine"): {"metadata": {"name": "mine", "namespace": "ns"}},
}


def lookup(kind: Kind, name: str) -> dict[str, Any] | None:
    return OBJECTS.get((kind.kind, name))


@pytest.fixture
def folders(tmp_path: Path) -> VolumeFolders:
    return VolumeFolders(tmp_path / "data", tmp_path / "shm")


def mounts(folders: VolumeFolders, volumes: dict[str, Any], **paths: Any) -> dict[str, str]:
    pod = {
        "metadata": {"name": "p", "namespace": "ns", "uid": "12345678-u"},
        "spec": {"volumes": [{"name": name, **body} for name, body in volumes.items()]},
    }
    container = {
        "name": "main",
        "volumeMounts": [{"name": name, **mount} for name, mount in paths.items()],
    }
    return folders.mounts(pod, container, lookup)


def test_folders(folders: VolumeFolders) -> None:
    volumes: dict[str, Any] = {
        "a": {"emptyDir": {}},
        "b": {"emptyDir": {"medium": "Memory"}},
        "c": {"persistentVolumeClaim": {"claimName": "mine"}},
    }
    found = mounts(
        folders,
        volumes,
        a={"mountPath": "/tmp"},
        b={"mountPath": "/dev/shm"},
        c={"mountPath": "/store", "subPath": "deep"},
    )
    assert found["/tmp"] == str(folders.data / "pods/12345678-u/volumes/a")
    assert Path(found["/tmp"]).is_dir()
    assert Path(found["/dev/shm"]).is_relative_to(folders.memory)
    assert found["/store"] == str(folders.data / "volumes/ns/mine/deep")


def test_a_claim_may_stand_for_a_given_folder(folders: VolumeFolders, tmp_path: Path) -> None:
    claim = {"metadata": {"name": "m", "annotations": {FOLDER_ANNOTATION: str(tmp_path / "f")}}}
    assert folders.claim(claim) == tmp_path / "f"


def test_files_of_a_config_map_get_the_folders_of_mounts(folders: VolumeFolders) -> None:
    volumes = {
        "config": {"configMap": {"name": "c"}},
        "store": {"persistentVolumeClaim": {"claimName": "mine"}},
    }
    paths = {"config": {"mountPath": "/etc/x"}, "store": {"mountPath": "/store"}}
    found = mounts(folders, volumes, **paths)
    folder = Path(found["/etc/x"])
    assert json.loads((folder / "config.json").read_text()) == {"store": f"{found['/store']}/a"}
    # Facts are somebody's words: they stay as they are.
    assert (folder / "facts.jsonl").read_text() == '"/store"'
    assert mounts(folders, volumes, **paths) == found, "a second start writes them again"


def test_files_of_a_secret_are_for_the_user_alone(folders: VolumeFolders) -> None:
    items = [{"key": "token", "path": "deep/file"}]
    volumes = {"s": {"secret": {"secretName": "s", "items": items, "defaultMode": 0o644}}}
    folder = Path(mounts(folders, volumes, s={"mountPath": "/secrets"})["/secrets"])
    path = folder / "deep/file"
    assert path.read_text() == "top"
    assert path.stat().st_mode & 0o777 == 0o400
    assert not (folder / "other").exists()


def test_projected(folders: VolumeFolders) -> None:
    sources = [
        {"secret": {"name": "s", "items": [{"key": "token", "path": "t"}]}},
        {"configMap": {"name": "none", "optional": True}},
        {"downwardAPI": {"items": [{"path": "n", "fieldRef": {"fieldPath": "metadata.name"}}]}},
    ]
    volumes = {"p": {"projected": {"sources": sources}}}
    folder = Path(mounts(folders, volumes, p={"mountPath": "/p"})["/p"])
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"t": "top", "n": "p"}


@pytest.mark.parametrize(
    ("volume", "message"),
    [
        ({"configMap": {"name": "none"}}, 'configmap "none" not found'),
        (
            {"persistentVolumeClaim": {"claimName": "none"}},
            'persistentvolumeclaim "none" not found',
        ),
        ({"secret": {"secretName": "s", "items": [{"key": "k", "path": "k"}]}}, 'no key "k"'),
        ({"hostPath": {"path": "/"}}, "not supported"),
        ({"secret": {"secretName": "s", "items": [{"key": "token", "path": "../t"}]}}, "leaves"),
    ],
)
def test_what_cannot_be_mounted_is_named(
    folders: VolumeFolders, volume: dict[str, Any], message: str
) -> None:
    with pytest.raises(MissingError, match=message):
        mounts(folders, {"v": volume}, v={"mountPath": "/v"})


def test_memory_lies_in_the_data_folder_without_a_tmpfs(tmp_path: Path) -> None:
    assert memory_folder(tmp_path, tmp_path / "none") == tmp_path / "memory"
    assert memory_folder(tmp_path, tmp_path).parent == tmp_path


def test_memory_of_a_killed_run_is_removed_by_the_next(tmp_path: Path) -> None:
    left = memory_folder(tmp_path / "a", tmp_path)
    (left / "file").touch()
    assert memory_folder(tmp_path / "b", tmp_path) != left
    assert memory_folder(tmp_path / "a", tmp_path) == left
    assert list(left.iterdir()) == []
    left.rmdir()
    left.symlink_to(tmp_path)
    assert memory_folder(tmp_path / "a", tmp_path) != left


PLAN_POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "ns", "uid": "12345678-u"},
    "spec": {
        "volumes": [
            {
                "name": "plan",
                "configMap": {
                    "name": "plan",
                    "items": [{"key": "plan.json", "path": "plan.json"}],
                    "optional": True,
                },
            },
            {"name": "store", "persistentVolumeClaim": {"claimName": "mine"}},
        ]
    },
}
PLAN_CONTAINER: dict[str, Any] = {
    "name": "main",
    "volumeMounts": [
        {"name": "plan", "mountPath": "/etc/plan"},
        {"name": "store", "mountPath": "/store"},
    ],
}


def test_a_config_map_that_comes_changes_and_goes_is_followed(folders: VolumeFolders) -> None:
    objects = dict(OBJECTS)

    def live(kind: Kind, name: str) -> dict[str, Any] | None:
        return objects.get((kind.kind, name))

    found = folders.mounts(PLAN_POD, PLAN_CONTAINER, live)
    file = Path(found["/etc/plan"], "plan.json")
    assert not file.exists()
    for text, expected in (
        ('{"a": 1}', {"a": 1}),
        ('{"a": 2}', {"a": 2}),
        ('{"a": "/store/x"}', {"a": f"{found['/store']}/x"}),
    ):
        objects["ConfigMap", "plan"] = {"data": {"plan.json": text, "other": "not named"}}
        folders.follow(PLAN_POD, PLAN_CONTAINER, live, found)
        assert json.loads(file.read_text()) == expected
        assert [item.name for item in file.parent.iterdir()] == ["plan.json"]
    before = file.stat().st_ino
    folders.follow(PLAN_POD, PLAN_CONTAINER, live, found)
    assert file.stat().st_ino == before, "an equal file is left alone"
    del objects["ConfigMap", "plan"]
    folders.follow(PLAN_POD, PLAN_CONTAINER, live, found)
    assert not file.exists()


def test_files_of_an_open_reader_are_not_torn(folders: VolumeFolders) -> None:
    objects = {**OBJECTS, ("ConfigMap", "plan"): {"data": {"plan.json": "old"}}}

    def live(kind: Kind, name: str) -> dict[str, Any] | None:
        return objects.get((kind.kind, name))

    found = folders.mounts(PLAN_POD, PLAN_CONTAINER, live)
    with open(Path(found["/etc/plan"], "plan.json")) as stream:
        objects["ConfigMap", "plan"] = {"data": {"plan.json": "newer"}}
        folders.follow(PLAN_POD, PLAN_CONTAINER, live, found)
        assert stream.read() == "old"


def test_a_sub_path_and_a_missing_map_are_left_as_they_are(folders: VolumeFolders) -> None:
    pod: dict[str, Any] = {
        "metadata": PLAN_POD["metadata"],
        "spec": {"volumes": [{"name": "c", "configMap": {"name": "c"}}]},
    }
    objects = dict(OBJECTS)

    def live(kind: Kind, name: str) -> dict[str, Any] | None:
        return objects.get((kind.kind, name))

    part = {"name": "c", "mountPath": "/part", "subPath": "facts.jsonl"}
    container = {"name": "main", "volumeMounts": [part]}
    found = folders.mounts(pod, container, live)
    objects["ConfigMap", "c"] = {"data": {"facts.jsonl": "new"}}
    folders.follow(pod, container, live, found)
    assert Path(found["/part"]).read_text() == '"/store"'
    whole = {"name": "main", "volumeMounts": [{"name": "c", "mountPath": "/all"}]}
    found = folders.mounts(pod, whole, live)
    objects.clear()
    with pytest.raises(MissingError, match="configmap"):
        folders.follow(pod, whole, live, found)
    assert Path(found["/all"], "facts.jsonl").read_text() == "new"
