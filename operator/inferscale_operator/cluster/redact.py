"""What is kept of objects in memory: no managed fields, and of Secrets no values."""

from __future__ import annotations

import hashlib

from inferscale_operator.api.base import GROUP
from inferscale_operator.desired.kinds import SECRET, Kind, Manifest

SECRET_DIGEST = f"{GROUP}/data-digest"
"""Annotation that stands for the values of a Secret that was read."""


def trimmed(kind: Kind, manifest: Manifest) -> Manifest:
    """The object without what no decision needs, with kind and version set.

    Lists leave ``kind`` and ``apiVersion`` of their items out; a Secret's values are replaced by
    empty strings and one digest over all of them.
    """
    metadata = {k: v for k, v in manifest["metadata"].items() if k != "managedFields"}
    result = {**manifest, "apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    if kind == SECRET:
        data = result.pop("data", None) or {}
        result.pop("stringData", None)
        result["data"] = dict.fromkeys(sorted(data), "")
        annotations = {
            k: v
            for k, v in (metadata.get("annotations") or {}).items()
            if k != "kubectl.kubernetes.io/last-applied-configuration"  # it holds the values
        }
        metadata["annotations"] = annotations | {SECRET_DIGEST: _digest(metadata, data)}
    return result


def _digest(metadata: Manifest, data: dict[str, str]) -> str:
    # The uid keeps equal values in two Secrets from showing as equal.
    state = hashlib.sha256(str(metadata.get("uid", "")).encode())
    for key in sorted(data):
        state.update(f"\0{key}\0{data[key]}".encode())
    return state.hexdigest()[:16]
