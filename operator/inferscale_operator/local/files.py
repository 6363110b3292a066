"""Files with manifests and the folders that stand for existing claims (I/O)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from inferscale_operator.desired.kinds import CLAIM, Manifest
from inferscale_operator.local.documents import DocumentError, existing_claims, read_documents
from inferscale_operator.local.volumes import FOLDER_ANNOTATION

Signature = list[tuple[int, int, int] | None]


class ManifestFiles:
    """What the user has written.

    Args:
        files: The files.
        volumes: Folder for each existing claim.
    """

    def __init__(self, files: Sequence[Path], volumes: Mapping[str, Path]) -> None:
        self._files = tuple(files)
        self._volumes = dict(volumes)

    def read(self) -> list[Manifest]:
        """All manifests, checked, in the order in which they are to be applied; claims first.

        Raises:
            DocumentError: They are not fit to be run.
        """
        texts = {}
        for file in self._files:
            try:
                texts[str(file)] = file.read_text()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not a text in UTF-8"
                raise DocumentError([f"{file}: {reason}; name a file with manifests"]) from None
        documents = read_documents(texts)
        problems = [
            f"{document['kind']}/{document['metadata']['name']}: {path} '{name}': there is no such "
            f"claim on this machine; give it a folder with --volume {name}=DIR"
            for document in documents
            for path, name in existing_claims(document)
            if name not in self._volumes
        ]
        if problems:
            raise DocumentError(problems)
        namespaces = sorted({document["metadata"]["namespace"] for document in documents})
        claims = [
            _claim(namespace, name, folder)
            for namespace in namespaces
            for name, folder in self._volumes.items()
        ]
        return [*claims, *documents]

    def signature(self) -> Signature:
        """Differs when a file was changed, replaced, made or removed."""
        found: Signature = []
        for file in self._files:
            try:
                stat = os.stat(file)
            except OSError:
                found.append(None)
            else:
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return found


def _claim(namespace: str, name: str, folder: Path) -> Manifest:
    return {
        "apiVersion": CLAIM.api_version,
        "kind": CLAIM.kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "annotations": {FOLDER_ANNOTATION: str(folder.absolute())},
        },
        "spec": {"accessModes": ["ReadWriteMany"], "volumeMode": "Filesystem"},
    }
