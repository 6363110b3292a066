"""Server-side apply on plain JSON: what a manager stops setting goes, what others set stays.

Pure. Objects merge key by key; lists are replaced as a whole. That is coarser than the API server's
own rules (which merge lists by key), and enough for manifests that one manager writes completely.
"""

from __future__ import annotations

import copy
from typing import Any

from inferscale_operator.desired.kinds import Manifest

SYSTEM_METADATA = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "managedFields",
)
"""Fields of ``metadata`` that only the cluster writes."""


def merge(live: Manifest, previous: Manifest, desired: Manifest) -> Manifest:
    """The object after an apply.

    Args:
        live: The object as it is.
        previous: What the same manager applied last; empty for the first time.
        desired: What it applies now.

    Returns:
        A new object.
    """
    result = copy.deepcopy(live)
    _remove(result, previous, desired)
    _overlay(result, desired)
    return result


def owned_part(manifest: Manifest) -> Manifest:
    """What an applied manifest claims: all but identity, status and system metadata."""
    owned = {key: copy.deepcopy(value) for key, value in manifest.items() if key != "status"}
    metadata = owned.get("metadata", {})
    owned["metadata"] = {k: v for k, v in metadata.items() if k not in SYSTEM_METADATA}
    return owned


def _remove(live: dict[str, Any], previous: dict[str, Any], desired: dict[str, Any]) -> None:
    for key, old in previous.items():
        if key not in live:
            continue
        if key not in desired:
            if isinstance(old, dict) and isinstance(live[key], dict):
                _remove(live[key], old, {})
                if not live[key]:
                    del live[key]
            else:
                del live[key]
        elif isinstance(old, dict) and isinstance(live[key], dict):
            new = desired[key]
            _remove(live[key], old, new if isinstance(new, dict) else {})


def _overlay(live: dict[str, Any], desired: dict[str, Any]) -> None:
    for key, value in desired.items():
        if isinstance(value, dict) and isinstance(live.get(key), dict):
            _overlay(live[key], value)
        else:
            live[key] = copy.deepcopy(value)
