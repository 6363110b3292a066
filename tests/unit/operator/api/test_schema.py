"""From pydantic to Kubernetes' dialect of OpenAPI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from inferscale_operator.api.crdgen import crd_text
from inferscale_operator.api.crds import DEFINITIONS, Definition, build_crd
from inferscale_operator.api.rules import RULES, Rule, Struct
from inferscale_operator.api.schema import structural_schema, without_defaults

MANY_BYTES = 256 * 1024
SHORT = Rule(cel="size(self) < 9", message="too long", holds=lambda value: len(value) < 9)
FIRST = Rule(cel="self.a < 9", message="a is high", holds=lambda self: self.a < 9)


Key = Annotated[str, Field(min_length=1, max_length=7, pattern="^[a-z]+$")]


class Inner(Struct):
    """A part."""

    rules = (FIRST,)

    a: int = Field(1, gt=0, lt=10)
    """A number,
    in two lines."""


class Outer(Struct):
    """The whole."""

    inner: Inner = Field(default_factory=Inner)
    """Part with defaults."""
    needed: Inner
    """Part that must be given."""
    maybe: Inner | None = None
    """Optional part."""
    text: Annotated[str, SHORT] | None = Field(None, max_length=5)
    """Optional text."""
    fixed: Literal["one"] = "one"
    """A constant."""
    names: list[str] = Field(default_factory=list, max_length=2)
    """Names."""
    labels: dict[Key, str] = Field(default_factory=dict)
    """Labels."""


SCHEMA = structural_schema(Outer)["properties"]


def test_an_optional_field_is_plain_and_not_required() -> None:
    assert structural_schema(Outer)["required"] == ["needed"]
    assert SCHEMA["text"] == {
        "type": "string",
        "maxLength": 5,
        "description": "Optional text.",
        RULES: [SHORT.manifest()],
    }
    assert SCHEMA["maybe"]["properties"] == SCHEMA["needed"]["properties"]


def test_exclusive_bounds_have_flags() -> None:
    number = SCHEMA["needed"]["properties"]["a"]

    assert number == {
        "type": "integer",
        "default": 1,
        "description": "A number, in two lines.",
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 10,
        "exclusiveMaximum": True,
    }


def test_defaults_of_parts_are_written_out_and_empty_ones_left_out() -> None:
    assert SCHEMA["inner"]["default"] == {"a": 1}
    assert "default" not in SCHEMA["names"]
    assert "default" not in SCHEMA["labels"]


def test_a_field_s_own_description_wins_and_rules_stay() -> None:
    assert SCHEMA["maybe"]["description"] == "Optional part."
    assert SCHEMA["maybe"][RULES] == [FIRST.manifest()]


def test_a_constant_is_an_enumeration() -> None:
    assert SCHEMA["fixed"]["enum"] == ["one"]


def test_bounds_of_keys_become_a_rule() -> None:
    assert SCHEMA["labels"]["additionalProperties"] == {"type": "string"}
    (rule,) = SCHEMA["labels"][RULES]
    assert rule["rule"] == ("self.all(k, size(k) >= 1 && size(k) <= 7 && k.matches(r'^[a-z]+$'))")


def test_a_choice_of_types_is_refused() -> None:
    class Choice(Struct):
        either: int | str

    with pytest.raises(ValueError, match=r"Choice\.either: .* choice of types"):
        structural_schema(Choice)


def test_keys_without_bounds_are_refused() -> None:
    class Loose(Struct):
        labels: dict[Annotated[str, Field(min_length=0)], str]

    with pytest.raises(ValueError, match="keys of a map need bounds"):
        structural_schema(Loose)


def test_a_word_that_the_dialect_lacks_is_refused() -> None:
    class Pair(Struct):
        pair: tuple[int, int]

    with pytest.raises(ValueError, match=r"Pair\.pair: .* has no 'prefixItems'"):
        structural_schema(Pair)


def test_a_status_has_no_defaults() -> None:
    bare = without_defaults(structural_schema(Outer))

    assert any("default" in node for node in _nodes(structural_schema(Outer)))
    assert not any("default" in node for node in _nodes(bare))


def test_a_rule_without_a_predicate_holds_in_python() -> None:
    rule = Rule(cel="self == oldSelf", message="stays", holds=None)

    assert rule.check(3) == 3


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    """A schema and all that is inside it; not the branches of a quantity, which has its own."""
    if isinstance(node, dict):
        yield node
        for key, value in node.items():
            if key != "anyOf":
                yield from _nodes(value)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.plural)
class TestDefinitions:
    """Both generated definitions."""

    def test_nothing_is_left_to_resolve(self, definition: Definition) -> None:
        schema = build_crd(definition)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

        for node in _nodes(schema):
            assert not {"$ref", "$defs", "allOf", "oneOf", "const"} & set(node)
            assert "title" not in node or isinstance(node["title"], dict)
            assert node.get("additionalProperties") is not False

    def test_every_field_is_described_in_one_line(self, definition: Definition) -> None:
        schema = build_crd(definition)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

        for part in ("spec", "status"):
            for node in _nodes(schema["properties"][part]):
                for name, field in node.get("properties", {}).items():
                    assert field.get("description"), name
                    assert "\n" not in field["description"]

    def test_every_list_map_and_string_is_bounded(self, definition: Definition) -> None:
        schema = build_crd(definition)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

        for part in ("spec", "status"):
            for node in _nodes(schema["properties"][part]):
                match node.get("type"):
                    case "string":
                        assert "maxLength" in node or "enum" in node, node
                    case "array":
                        assert "maxItems" in node, node
                    case "object" if "additionalProperties" in node:
                        assert "maxProperties" in node, node
                    case "integer" | "number" if part == "spec":
                        assert {"minimum", "maximum"} <= set(node), node

    def test_it_fits_into_an_annotation(self, definition: Definition) -> None:
        assert len(crd_text(build_crd(definition)).encode()) < MANY_BYTES / 2

    def test_it_is_found_by_short_name_and_category(self, definition: Definition) -> None:
        names = build_crd(definition)["spec"]["names"]

        assert names["categories"] == ["inferscale"]
        assert names["shortNames"] == [definition.short_name]
        assert names["plural"] == names["singular"] + "s"
