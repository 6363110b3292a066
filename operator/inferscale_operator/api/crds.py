"""The two custom resource definitions as manifests; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inferscale_operator.api.base import GROUP, VERSION
from inferscale_operator.api.memorystore import MemoryStore
from inferscale_operator.api.personalizedmodel import PersonalizedModel
from inferscale_operator.api.rules import RULES, Resource
from inferscale_operator.api.schema import Schema, structural_schema, without_defaults

CATEGORY = "inferscale"
"""``kubectl get inferscale`` lists both kinds."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of ``kubectl get``.

    Attributes:
        name: Heading.
        path: JSONPath in the object.
        type: OpenAPI type.
        wide: Whether it is shown with ``-o wide`` only.
    """

    name: str
    path: str
    type: str = "string"
    wide: bool = False

    def manifest(self) -> dict[str, Any]:
        """The column as the definition holds it."""
        column: dict[str, Any] = {"name": self.name, "type": self.type, "jsonPath": self.path}
        return column | ({"priority": 1} if self.wide else {})


@dataclass(frozen=True, slots=True)
class Definition:
    """One kind and what a client sees of it beside its schema.

    Attributes:
        model: The pydantic model; its name is the kind.
        plural: Name in URLs.
        short_name: For kubectl.
        columns: Columns of ``kubectl get``.
        scale: The scale subresource, if there is one.
    """

    model: type[Resource]
    plural: str
    short_name: str
    columns: tuple[Column, ...]
    scale: dict[str, str] | None = None

    @property
    def file_name(self) -> str:
        """Name of the generated file."""
        return f"{GROUP}_{self.plural}.yaml"


def _condition(field: str) -> str:
    return f'.status.conditions[?(@.type=="Ready")].{field}'


_FIRST = (
    Column("Ready", _condition("status")),
    Column("Reason", _condition("reason")),
    Column("Model", ".spec.model.id"),
    Column("Facts", ".status.facts.summary"),
    Column("Tier", ".status.tier"),
)
_AGE = Column("Age", ".metadata.creationTimestamp", "date")
_MESSAGE = Column("Message", _condition("message"), wide=True)

DEFINITIONS = (
    Definition(
        MemoryStore,
        "memorystores",
        "mstore",
        (
            *_FIRST,
            Column("Bytes", ".status.storeBytes", "integer"),
            _AGE,
            _MESSAGE,
            Column("Fingerprint", ".status.fingerprint", wide=True),
        ),
    ),
    Definition(
        PersonalizedModel,
        "personalizedmodels",
        "pmodel",
        (
            *_FIRST,
            Column("Replicas", ".status.replicas", "integer"),
            _AGE,
            _MESSAGE,
            Column("Endpoint", ".status.endpoint", wide=True),
            Column("Generation", ".status.serving.hash", wide=True),
        ),
        {
            "specReplicasPath": ".spec.serving.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    ),
)


def resource_schema(definition: Definition) -> Schema:
    """The schema of a whole object of this kind."""
    whole = structural_schema(definition.model)
    body = whole["properties"]
    description = " ".join((definition.model.__doc__ or "").split())
    return {
        "type": "object",
        "description": description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": definition.model.name_pattern}
                },
            },
            "spec": body["spec"],
            "status": without_defaults(body["status"]),
        },
        RULES: whole[RULES],
    }


def build_crd(definition: Definition) -> dict[str, Any]:
    """The CustomResourceDefinition of one kind."""
    kind = definition.model.__name__
    subresources: dict[str, Any] = {"status": {}}
    if definition.scale:
        subresources["scale"] = dict(definition.scale)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{definition.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": definition.plural,
                "singular": kind.lower(),
                "shortNames": [definition.short_name],
                "categories": [CATEGORY],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [c.manifest() for c in definition.columns],
                    "schema": {"openAPIV3Schema": resource_schema(definition)},
                    "subresources": subresources,
                }
            ],
        },
    }
