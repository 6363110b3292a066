"""One bad manifest for each bound, type, pattern and enumeration of the generated schemas."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.unit.operator.api.manifests import FULL, Manifest

from inferscale_operator.api.crds import DEFINITIONS, resource_schema


@dataclass(frozen=True)
class Case:
    """A manifest that must be refused.

    Attributes:
        name: What is wrong.
        manifest: The manifest.
        path: Field that the message names.
        words: What else it says.
    """

    name: str
    manifest: Manifest
    path: str
    words: str = ""


def _bad_values(node: Manifest) -> Iterator[tuple[str, Any]]:
    """One bad value for each thing that a node of the schema says."""
    kind = node.get("type")
    wrong: dict[str | None, Any] = {"string": 7, "array": "x", "object": "x", "boolean": "yes"}
    yield "type", wrong.get(kind, True)
    if kind in {"integer", "number"}:
        yield "type", "5"
    if "minimum" in node:
        yield "minimum", node["minimum"] - 1
    if "maximum" in node:
        yield "maximum", node["maximum"] + 1
    if node.get("minLength"):
        yield "minLength", ""
    if "maxLength" in node and "enum" not in node:
        yield "maxLength", "a" * (node["maxLength"] + 1)
    if "pattern" in node:
        yield "pattern", " \t"
    if "enum" in node:
        yield "enum", "Other"
    if node.get("minItems"):
        yield "minItems", []
    if "maxItems" in node:
        yield "maxItems", [_item(node["items"], n) for n in range(node["maxItems"] + 1)]
    if "maxProperties" in node:
        yield "maxProperties", {f"k{n}": "1" for n in range(node["maxProperties"] + 1)}
    if "additionalProperties" in node:
        yield "keys", {"no key": "1"}


def _item(node: Manifest, number: int) -> Any:
    if node["type"] != "object":
        return f"n{number}"
    return {"name" if "name" in node["properties"] else "key": f"n{number}"}


def _walk(
    node: Manifest, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], Manifest]]:
    for name, part in node.get("properties", {}).items():
        yield (*path, name), part
        yield from _walk(part, (*path, name))
    if "items" in node:
        yield (*path, 0), node["items"]
        yield from _walk(node["items"], (*path, 0))
    if "additionalProperties" in node:
        yield (*path, "*"), node["additionalProperties"]


def _replaced(value: Any, path: tuple[str | int, ...], bad: Any) -> Any:
    """The value with another one at a path; ``KeyError`` where the path does not lead."""
    if not path:
        return bad
    head = next(iter(value)) if path[0] == "*" else path[0]
    result = copy.copy(value)
    result[head] = _replaced(value[head], path[1:], bad)
    return result


def _has(manifest: Manifest, path: tuple[str | int, ...]) -> bool:
    value: Any = manifest
    for part in path:
        key = next(iter(value)) if part == "*" else part
        if isinstance(value, dict) and key not in value:
            return False
        value = value[key]
    return True


def dotted(path: tuple[str | int, ...]) -> str:
    """A path as the API server writes it; a key of a map ends it."""
    parts = path[: path.index("*")] if "*" in path else path
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts).lstrip(".")


def bound_cases() -> list[Case]:
    """One case for each bound, type, pattern and enumeration of the generated schemas."""
    found = []
    for definition in DEFINITIONS:
        kind = definition.model.__name__
        spec = resource_schema(definition)["properties"]["spec"]
        for path, node in _walk(spec, ("spec",)):
            base = next(full for full in FULL if full["kind"] == kind and _has(full, path))
            for what, bad in _bad_values(node):
                name = f"{kind} {'.'.join(map(str, path))} {what}"
                found.append(Case(name, _replaced(base, path, bad), dotted(path)))
    return found
