"""What an API server would say about a manifest, for those who have none (``inferscale up``).

Readers of stored objects take the models alone: they ignore unknown fields, because an older
operator may meet newer objects. Here a misspelt field is an error, as in ``kubectl apply``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import ValidationError

from inferscale_operator.api.base import API_VERSION
from inferscale_operator.api.crds import DEFINITIONS, resource_schema
from inferscale_operator.api.schema import Schema

_BY_KIND = {definition.model.__name__: definition for definition in DEFINITIONS}


def find_problems(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with a custom resource, as ``field: sentence``; empty when it is good.

    Rules that compare with a stored object are left out. Values are not repeated.
    """
    definition = _BY_KIND.get(str(manifest.get("kind")))
    if definition is None:
        return [f"kind: must be {' or '.join(_BY_KIND)}"]
    found = []
    if manifest.get("apiVersion") != API_VERSION:
        found.append(f"apiVersion: must be {API_VERSION}")
    if not dict(manifest.get("metadata") or {}).get("name"):
        found.append("metadata.name: is missing")
    found += _unknown(_schema(definition.model.__name__), manifest, "")
    try:
        definition.model.model_validate(manifest)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            message = problem["msg"].removeprefix("Value error, ")
            found.append(f"{field_path(problem['loc'])}: {message}")
    return found


def field_path(parts: tuple[int | str, ...]) -> str:
    """A place in a manifest as Kubernetes writes it: ``spec.serving.tolerations[0].key``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")


@cache
def _schema(kind: str) -> Schema:
    schema = resource_schema(_BY_KIND[kind])
    schema["properties"]["metadata"] = {}
    return schema


def _unknown(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _unknown(schema.get("items", {}), item, f"{path}[{number}]")
    known = schema.get("properties")
    if not isinstance(value, dict) or known is None:
        return
    for name, part in value.items():
        place = f"{path}.{name}".removeprefix(".")
        if name in known:
            yield from _unknown(known[name], part, place)
        else:
            near = difflib.get_close_matches(str(name), known, n=1)
            yield f"{place}: unknown field" + (f"; did you mean '{near[0]}'?" if near else "")
