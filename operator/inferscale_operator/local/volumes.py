"""Volumes of a Pod as folders (I/O).

Folders of claims lie in ``DATA/volumes/<namespace>/<claim>`` and stay. Everything else lies in the
pod's own folder and goes with the pod. ConfigMaps and Secrets are written anew for each container,
because mount paths inside JSON documents differ between containers. Both are followed while a
container runs, but not where a ``subPath`` of them is mounted: a kubelet does the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferscale_operator.desired.kinds import CLAIM, CONFIG_MAP, SECRET, Manifest
from inferscale_operator.local.environment import Lookup, MissingError, field_value, object_texts
from inferscale_operator.local.expansion import rewrite_json

FOLDER_ANNOTATION = "inferscale.dev/folder"
"""On a claim: the existing folder that stands for it."""

_FILES = frozenset({"configMap", "secret", "projected", "downwardAPI"})


@dataclass(frozen=True, slots=True)
class VolumeFolders:
    """Where folders are made.

    Attributes:
        data: The data folder.
        memory: Folder for ``medium: Memory``, on a tmpfs where there is one.
    """

    data: Path
    memory: Path

    def pod(self, pod: Manifest) -> Path:
        """The pod's own folder."""
        return self.data / "pods" / str(pod["metadata"]["uid"])

    def claim(self, claim: Manifest) -> Path:
        """The folder of a claim."""
        metadata = claim["metadata"]
        named = (metadata.get("annotations") or {}).get(FOLDER_ANNOTATION)
        if named:
            return Path(named)
        return self.data / "volumes" / str(metadata["namespace"]) / str(metadata["name"])

    def remove_pod(self, pod: Manifest) -> None:
        """Removes what belongs to a pod alone."""
        shutil.rmtree(self.pod(pod), ignore_errors=True)
        shutil.rmtree(self._memory(pod), ignore_errors=True)

    def mounts(self, pod: Manifest, container: Mapping[str, Any], lookup: Lookup) -> dict[str, str]:
        """Makes the folders of one container.

        Args:
            pod: The Pod.
            container: One of its containers.
            lookup: Finds claims, ConfigMaps and Secrets.

        Returns:
            Mount path -> folder.

        Raises:
            MissingError: Naming what is missing.
        """
        volumes = {item["name"]: item for item in pod["spec"].get("volumes") or []}
        mounts: dict[str, str] = {}
        files: dict[str, list[_File]] = {}
        for mount in container.get("volumeMounts") or []:
            volume = volumes.get(mount["name"])
            if volume is None:
                raise MissingError(f'volume "{mount["name"]}" of a mount is not in the pod')
            if _FILES & set(volume):
                folder = self.pod(pod) / "files" / container["name"] / mount["name"]
                files[str(folder)] = list(_volume_files(pod, volume, lookup))
            else:
                folder = self._folder(pod, volume, lookup)
            if mount.get("subPath"):
                folder = folder / str(mount["subPath"])
            mounts[mount["mountPath"]] = str(folder)
        for name, items in files.items():
            _write_files(Path(name), items, mounts)
        return mounts

    def follow(
        self,
        pod: Manifest,
        container: Mapping[str, Any],
        lookup: Lookup,
        mounts: Mapping[str, str],
    ) -> None:
        """Brings the files of a container's ConfigMaps and Secrets up to date, each by one rename.

        Args:
            pod: The Pod.
            container: One of its containers.
            lookup: Finds them as they are now.
            mounts: Mount path -> folder, as the container was started with.

        Raises:
            MissingError: Naming what is missing; the files stay as they are.
        """
        volumes = {item["name"]: item for item in pod["spec"].get("volumes") or []}
        for mount in container.get("volumeMounts") or []:
            volume = volumes[mount["name"]]
            if {"configMap", "secret"} & set(volume) and not mount.get("subPath"):
                files = list(_volume_files(pod, volume, lookup))
                _update_files(Path(mounts[mount["mountPath"]]), files, mounts)

    def _folder(self, pod: Manifest, volume: Mapping[str, Any], lookup: Lookup) -> Path:
        if "emptyDir" in volume:
            if (volume["emptyDir"] or {}).get("medium") == "Memory":
                folder = self._memory(pod) / str(volume["name"])
            else:
                folder = self.pod(pod) / "volumes" / str(volume["name"])
        elif "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            claim = lookup(CLAIM, name)
            if claim is None:
                raise MissingError(f'persistentvolumeclaim "{name}" not found')
            folder = self.claim(claim)
        else:
            raise MissingError(f'volume "{volume["name"]}": this type is not supported here')
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _memory(self, pod: Manifest) -> Path:
        return self.memory / f"{str(pod['metadata']['uid'])[:8]}-{pod['metadata']['name']}"


def memory_folder(data: Path, tmpfs: Path = Path("/dev/shm")) -> Path:
    """Where ``medium: Memory`` lies: a fresh folder below ``tmpfs``, else in the data folder.

    Named after the data folder, so that the next run removes what a killed one has left there.
    """
    if not (tmpfs.is_dir() and os.access(tmpfs, os.W_OK)):
        return data / "memory"
    name = hashlib.sha256(str(data.absolute()).encode()).hexdigest()[:12]
    folder = tmpfs / f"inferscale-up-{os.getuid()}-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # somebody else's, or a link: not touched
        return Path(tempfile.mkdtemp(prefix="inferscale-up-", dir=tmpfs))
    return folder


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    content: bytes
    mode: int
    may_hold_paths: bool


def _volume_files(pod: Manifest, volume: Mapping[str, Any], lookup: Lookup) -> Iterable[_File]:
    if "projected" in volume:
        for source in volume["projected"].get("sources") or []:
            yield from _source_files(pod, source, lookup)
    else:
        yield from _source_files(pod, volume, lookup)


def _source_files(pod: Manifest, source: Mapping[str, Any], lookup: Lookup) -> Iterable[_File]:
    for field, kind, name_field in (
        ("configMap", CONFIG_MAP, "name"),
        ("secret", SECRET, "secretName"),
    ):
        if field not in source:
            continue
        body = source[field]
        name = body.get(name_field) or body["name"]
        optional = bool(body.get("optional"))
        texts = object_texts(kind, name, optional, lookup)
        items = body.get("items") or [{"key": key, "path": key} for key in texts]
        # Secrets are for the user alone, whatever mode the manifest asks for.
        mode = 0o400 if kind == SECRET else 0o444
        for item in items:
            if item["key"] in texts:
                is_json = kind == CONFIG_MAP and str(item["key"]).endswith(".json")
                yield _File(item["path"], texts[item["key"]], mode, is_json)
            elif not optional:
                raise MissingError(f'{kind.kind} "{name}" has no key "{item["key"]}"')
    for item in (source.get("downwardAPI") or {}).get("items") or []:
        value = field_value(pod, item["fieldRef"]["fieldPath"])
        yield _File(item["path"], value.encode(), 0o444, False)


def _write_files(folder: Path, files: Iterable[_File], mounts: Mapping[str, str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    for file in files:
        path = _inside(folder, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(_content(file, mounts))
        path.chmod(file.mode)


def _update_files(folder: Path, files: Iterable[_File], mounts: Mapping[str, str]) -> None:
    wanted = {_inside(folder, file): file for file in files}
    for path in [item for item in folder.rglob("*") if item.is_file() and item not in wanted]:
        path.unlink()
    for path, file in wanted.items():
        content = _content(file, mounts)
        if path.is_file() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        fresh.unlink(missing_ok=True)
        fresh.write_bytes(content)
        fresh.chmod(file.mode)
        fresh.replace(path)


def _inside(folder: Path, file: _File) -> Path:
    path = folder / file.path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise MissingError(f'path "{file.path}" of a volume leaves the volume')
    return path


def _content(file: _File, mounts: Mapping[str, str]) -> bytes:
    if not file.may_hold_paths:
        return file.content
    return rewrite_json(file.content.decode(), mounts).encode()
