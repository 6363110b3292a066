"""Names, labels, owner references and digests of children, in one place."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from inferscale_operator.api.base import API_VERSION, GROUP
from inferscale_operator.desired.kinds import Kind, Manifest

FIELD_MANAGER = "inferscale-operator"
MANAGED_BY = "app.kubernetes.io/managed-by"
OWNER_KIND = f"{GROUP}/owner-kind"
OWNER = f"{GROUP}/owner"
GENERATION = f"{GROUP}/generation"
"""On a server generation's children: digest of what makes it a generation of its own."""
INPUT = f"{GROUP}/input"
"""On an encoding Job: digest of everything that it was started for."""
ATTEMPT = f"{GROUP}/attempt"
DIGEST = f"{GROUP}/desired"
"""Annotation on every child: digest of the manifest that was applied last."""
FINALIZER = f"{GROUP}/erase"
"""Keeps a MemoryStore until its stored bytes are gone."""

Owner = Manifest
"""The custom resource that owns a child."""


def digest(value: Any, length: int = 10) -> str:
    """A short digest of a JSON value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def owner_labels(owner: Owner) -> dict[str, str]:
    """Labels by which the children of a resource are found."""
    return {
        MANAGED_BY: FIELD_MANAGER,
        OWNER_KIND: owner["kind"],
        OWNER: owner["metadata"]["name"],
    }


def labels(owner: Owner, component: str) -> dict[str, str]:
    """All labels of a child.

    Args:
        owner: The custom resource.
        component: ``encoder``, ``server`` or ``router``.
    """
    return owner_labels(owner) | {
        "app.kubernetes.io/name": f"inferscale-{component}",
        "app.kubernetes.io/instance": owner["metadata"]["name"],
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "inferscale",
    }


def owner_reference(owner: Owner) -> Manifest:
    """The controlling owner reference."""
    return {
        "apiVersion": API_VERSION,
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def child(
    kind: Kind, owner: Owner, name: str, component: str, body: Manifest, **extra: str
) -> Manifest:
    """A child's manifest, with labels, owner and digest.

    Args:
        kind: Its kind.
        owner: The custom resource.
        name: Its name.
        component: ``encoder`` or ``server``.
        body: Everything beside ``apiVersion``, ``kind`` and ``metadata``.
        **extra: Further labels, the key's prefix left out: ``generation="abc"``.
    """
    manifest: Manifest = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": labels(owner, component)
            | {f"{GROUP}/{key}": value for key, value in extra.items()},
            "ownerReferences": [owner_reference(owner)],
        },
        **body,
    }
    return stamp(manifest)


def stamp(manifest: Manifest) -> Manifest:
    """Puts the manifest's own digest on it."""
    metadata = dict(manifest["metadata"])
    annotations = {k: v for k, v in metadata.get("annotations", {}).items() if k != DIGEST}
    bare = {**manifest, "metadata": {**metadata, "annotations": annotations}}
    metadata["annotations"] = annotations | {DIGEST: digest(bare, 16)}
    return {**manifest, "metadata": metadata}
