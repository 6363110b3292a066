"""Base of every part of a custom resource, and rules that hold on both sides.

A rule is one CEL expression for the API server and one Python predicate for those who read a
resource without it (``inferscale up``) or from an older cluster; tests give both the same cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

RULES = "x-kubernetes-validations"
MAX_NAME_LENGTH = 40
"""Longest name of a custom resource: children add suffixes and must stay below 63 characters."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule beyond types and bounds; in ``Annotated`` it guards one field.

    Attributes:
        cel: Expression that is true for a good value (``self``). Empty: the schema has another
            word for it.
        message: What is wrong and how to mend it.
        holds: The same as ``cel`` in Python. None: the rule compares an old value with a new one
            (``oldSelf``), which only the API server can.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None

    def check(self, value: Any) -> Any:
        """The value itself; ``ValueError`` with the message when the rule does not hold."""
        if self.holds is not None and not self.holds(value):
            raise ValueError(self.message)
        return value

    def manifest(self) -> dict[str, str]:
        """The rule as the schema holds it."""
        return {"rule": self.cel, "message": self.message}

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        document = dict(handler(schema))
        if not self.cel:
            return document
        return {**document, RULES: [*document.get(RULES, ()), self.manifest()]}


class Struct(BaseModel):
    """Base of every part of a custom resource.

    Unknown fields are ignored when read (the API server has pruned or refused them; an older
    operator may meet newer objects); snake_case here is camelCase there.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",
        strict=True,  # "5" is no number for the API server either
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules between the fields of this part."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.rules:
            rule.check(self)
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        document = handler(schema)
        if cls.rules:
            definition = handler.resolve_ref_schema(document)
            definition[RULES] = [rule.manifest() for rule in cls.rules]
        return document


class Resource(Struct):
    """Base of the custom resources themselves."""

    name_pattern: ClassVar[str] = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
    """What ``metadata.name`` must match: it is part of the children's names."""

    rules = (
        Rule(
            cel=f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
            message=(
                f"metadata.name must have at most {MAX_NAME_LENGTH} characters:"
                " names of children are made from it"
            ),
            holds=lambda self: len(self.metadata.get("name", "")) <= MAX_NAME_LENGTH,
        ),
    )

    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("metadata")
    @classmethod
    def _check_name(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        name = metadata.get("name")
        if name and not re.search(cls.name_pattern, name):
            raise ValueError(f"name '{name}' must match '{cls.name_pattern}'")
        return metadata


def same_optional(left: str, right: str, part: str = "") -> str:
    """CEL: two optional fields are both absent or equal (in this part of them, such as ``.name``).

    Not ``orValue``: the API server cannot bound its cost.
    """
    return f"has({left}) == has({right}) && (!has({left}) || {left}{part} == {right}{part})"
