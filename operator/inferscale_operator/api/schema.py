"""From a pydantic model to the structural OpenAPI schema of a custom resource definition.

Pure. What Kubernetes' dialect has no word for is translated (exclusive bounds, constants, optional
fields) or becomes a CEL rule (bounds of map keys); what is left over is an error, so that no bound
is lost silently.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from inferscale_operator.api.rules import RULES

Schema = dict[str, Any]

_DROPPED = frozenset({"title", "examples", "$defs", "propertyNames", "additionalProperties", RULES})
_KEPT = frozenset(
    {
        "type",
        "format",
        "description",
        "default",
        "enum",
        "pattern",
        "minimum",
        "maximum",
        "anyOf",
        "multipleOf",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "required",
    }
)
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


class _Generator(GenerateJsonSchema):
    """Writes defaults of nested parts out: the API server checks rules against them as they are."""

    def get_default_value(self, schema: core_schema.WithDefaultSchema) -> Any:
        factory = schema.get("default_factory")
        value = factory() if factory else schema.get("default")  # type: ignore[call-arg]
        if isinstance(value, BaseModel):
            return _without_empty(value.model_dump(by_alias=True, mode="json"))
        return value


def json_document(model: type[BaseModel]) -> Schema:
    """The JSON schema of a model, with one entry of ``$defs`` for each part."""
    return model.model_json_schema(by_alias=True, schema_generator=_Generator)


def structural_schema(model: type[BaseModel]) -> Schema:
    """The structural schema of a model, with nothing left to resolve.

    Optional fields are plain and not required; empty defaults (None, lists, maps) are left out.

    Raises:
        ValueError: For a construct that a structural schema cannot say.
    """
    document = json_document(model)
    return _convert(document, document.get("$defs", {}), model.__name__)


def without_defaults(schema: Schema) -> Schema:
    """The same schema without defaults: a status says only what was observed."""
    result = {key: value for key, value in schema.items() if key != "default"}
    if "properties" in schema:
        result["properties"] = {
            name: without_defaults(part) for name, part in schema["properties"].items()
        }
    for key in ("items", "additionalProperties"):
        if key in schema:
            result[key] = without_defaults(schema[key])
    return result


def resolve(node: Schema, definitions: Schema, path: str) -> Schema:
    """Follows references and optional wrappers; what stands beside them wins, rules add up."""
    branches: list[Schema]
    rest = dict(node)
    if "$ref" in node:
        branches = [definitions[str(rest.pop("$ref")).rpartition("/")[2]]]
    elif "allOf" in node:
        branches = rest.pop("allOf")
    elif "anyOf" in node and not node.get("x-kubernetes-int-or-string"):
        branches = [part for part in rest.pop("anyOf") if part.get("type") != "null"]
    else:
        return node
    if len(branches) != 1:
        raise ValueError(f"{path}: a structural schema cannot hold a choice of types")
    inner = resolve(branches[0], definitions, path)
    rules = [*inner.get(RULES, ()), *rest.get(RULES, ())]
    merged = {**inner, **rest}
    return {**merged, RULES: rules} if rules else merged


def _convert(node: Schema, definitions: Schema, path: str) -> Schema:
    """A node of the document as a node of the structural schema."""
    node = _plain_map(resolve(node, definitions, path))
    result: Schema = {}
    for key, value in node.items():
        if key == "properties":
            result[key] = {
                name: _convert(part, definitions, f"{path}.{name}") for name, part in value.items()
            }
        elif key == "items" or (key == "additionalProperties" and isinstance(value, dict)):
            result[key] = _convert(value, definitions, f"{path}[]")
        elif key not in _DROPPED:
            result |= _translate(key, value, path)
    rules = [*node.get(RULES, ())]
    if "propertyNames" in node:
        rules.insert(0, _key_rule(resolve(node["propertyNames"], definitions, path)))
    return {**result, RULES: rules} if rules else result


def _translate(key: str, value: Any, path: str) -> Schema:
    """One keyword in Kubernetes' dialect; empty when there is nothing to say."""
    if key == "const":
        return {"enum": [value]}
    if key == "description":
        return {key: " ".join(str(value).split())}
    if key == "default":
        return {} if value is None or value == [] or value == {} else {key: value}
    if key in _EXCLUSIVE:
        return {_EXCLUSIVE[key]: value, key: True}
    if key in _KEPT or key.startswith("x-kubernetes-"):
        return {key: value}
    raise ValueError(f"{path}: a structural schema has no '{key}'")


def _plain_map(node: Schema) -> Schema:
    """Takes a map's pattern of keys to where its other bounds of keys are."""
    if "patternProperties" not in node:
        return node
    ((pattern, values),) = node["patternProperties"].items()
    rest = {key: value for key, value in node.items() if key != "patternProperties"}
    names = {**node.get("propertyNames", {}), "pattern": pattern}
    return {**rest, "additionalProperties": values, "propertyNames": names}


def _without_empty(value: Schema) -> Schema:
    parts = {k: _without_empty(v) if isinstance(v, dict) else v for k, v in value.items()}
    return {k: v for k, v in parts.items() if v is not None and v != [] and v != {}}


def _key_rule(names: Schema) -> dict[str, str]:
    """A rule for what ``propertyNames`` says: the dialect does not have that word."""
    low, high, pattern = names.get("minLength", 0), names.get("maxLength"), names.get("pattern")
    parts = [f"size(k) >= {low}"] if low else []
    parts += [f"size(k) <= {high}"] if high else []
    parts += [f"k.matches(r'{pattern}')"] if pattern else []
    if not parts:
        raise ValueError("keys of a map need bounds")
    shape = f" and match {pattern}" if pattern else ""
    return {
        "rule": f"self.all(k, {' && '.join(parts)})",
        "message": f"keys must have {low} to {high} characters{shape}",
    }
