"""Whether a live object still is what the operator wants."""

from __future__ import annotations

from typing import Any

from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.desired.naming import DIGEST
from inferscale_runtime.budget import ConfigError, exact_quantity

_EXACT = frozenset({"selector", "matchLabels", "nodeSelector"})
"""Maps in which another key changes the meaning: a further label in a selector selects less."""

_EMPTY: tuple[Any, ...] = (None, {}, [], "")


def differs(desired: Manifest, live: Manifest) -> bool:
    """Compares a manifest with the live object.

    Args:
        desired: What the operator would apply, with its digest annotation.
        live: What the API server holds: defaults, status and other writers' fields beside ours.

    Returns:
        True when something that ``desired`` says is not so, or when ``live`` was applied from
        another manifest (a field that is not wanted any more leaves no other trace). Empty maps,
        lists and strings count as absent, because typed objects drop them.
    """
    ours = desired["metadata"].get("annotations", {}).get(DIGEST)
    theirs = live["metadata"].get("annotations", {}).get(DIGEST)
    return ours != theirs or not _holds(desired, live)


def _holds(desired: Any, live: Any) -> bool:
    if isinstance(desired, dict):
        if not isinstance(live, dict):
            return not desired and live is None
        return all(
            _holds(value, live.get(key)) and not (key in _EXACT and _has_more(value, live.get(key)))
            for key, value in desired.items()
        )
    if isinstance(desired, list):
        items = live or []
        return (
            isinstance(items, list)
            and len(items) == len(desired)
            and all(_holds(*pair) for pair in zip(desired, items, strict=True))
        )
    if desired in _EMPTY and live in _EMPTY:
        return True
    return bool(desired == live) or _same_quantity(desired, live)


def _has_more(desired: Any, live: Any) -> bool:
    """Whether a live map of labels has keys that are not wanted."""
    if not isinstance(desired, dict) or not isinstance(live, dict):
        return False
    labels = all(isinstance(value, str) for value in desired.values())
    return labels and bool(live.keys() - desired.keys())


def _same_quantity(desired: Any, live: Any) -> bool:
    """The API server writes quantities in its own form: ``1024Mi`` comes back as ``1Gi``."""
    if not isinstance(desired, str) or not isinstance(live, str):
        return False
    try:
        return exact_quantity(desired) == exact_quantity(live)
    except ConfigError:
        return False
