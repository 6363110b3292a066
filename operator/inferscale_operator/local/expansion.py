"""Texts of a Pod made fit for a process on this machine; pure.

Two steps: ``$(VAR)`` references are expanded as Kubernetes does it, and paths below a volume's
mount are turned into paths of the folder that stands for the volume, because a local process has no
mount namespace of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expands ``$(VAR)``; ``$$`` is a dollar sign, and unknown references stay as they are."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return "$"
        return variables.get(name, match.group(0))

    return _REFERENCE.sub(replace, text)


def rewrite(text: str, mounts: Mapping[str, str]) -> str:
    """Replaces a mount path at the start of a text, or after its first ``=``.

    Args:
        text: An argument or the value of a variable.
        mounts: Mount path -> folder.

    Returns:
        The text with the folder, or as it was. The longest mount path wins.
    """
    found = _rewrite_start(text, mounts)
    if found is not None:
        return found
    head, sign, tail = text.partition("=")
    if sign:
        found = _rewrite_start(tail, mounts)
        if found is not None:
            return f"{head}={found}"
    return text


def rewrite_json(text: str, mounts: Mapping[str, str]) -> str:
    """Rewrites the string values of a JSON document; a text that is none stays as it is."""
    try:
        document = json.loads(text)
    except ValueError:
        return text
    changed = _rewrite_value(document, mounts)
    return text if changed == document else json.dumps(changed)


def local_arguments(arguments: Sequence[str]) -> list[str]:
    """Listening on all interfaces becomes listening on loopback."""
    return [re.sub(r"^((?:--[^=]+=)?)0\.0\.0\.0$", r"\g<1>127.0.0.1", item) for item in arguments]


def _rewrite_start(text: str, mounts: Mapping[str, str]) -> str | None:
    for mount in sorted(mounts, key=len, reverse=True):
        base = mount.rstrip("/")
        if text == base or text.startswith(f"{base}/"):
            return mounts[mount].rstrip("/") + text[len(base) :]
    return None


def _rewrite_value(value: Any, mounts: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _rewrite_value(item, mounts) for key, item in value.items()}
    if isinstance(value, list):
        return [_rewrite_value(item, mounts) for item in value]
    if isinstance(value, str):
        found = _rewrite_start(value, mounts)
        return value if found is None else found
    return value
