"""What both kinds share: base model, quantities, references, conditions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

GROUP = "inferscale.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

MAX_NAME_LENGTH = 40
"""Longest name of a custom resource: children add suffixes and must stay below 63 characters."""

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$"


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
        use_attribute_docstrings=True,
    )


def rule(expression: str, message: str) -> dict[str, str]:
    """A CEL validation rule of the schema."""
    return {"rule": expression, "message": message}


def rules(*items: dict[str, str]) -> dict[str, Any]:
    """Schema extension that carries CEL rules."""
    return {"x-kubernetes-validations": list(items)}


Quantity = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
    Field(pattern=QUANTITY_PATTERN, max_length=32),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY_PATTERN,
            "maxLength": 32,
        }
    ),
]
"""A Kubernetes quantity, for example ``8Gi`` or ``500m``."""

ObjectName = Annotated[
    str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
"""Name of an object in the same namespace."""

StoreName = Annotated[
    str,
    Field(min_length=1, max_length=MAX_NAME_LENGTH, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
]
"""Name of a MemoryStore."""

Label = Annotated[str, Field(max_length=63)]
LabelKey = Annotated[str, Field(min_length=1, max_length=317)]


class SecretKeyRef(Struct):
    """One key of a Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: str = Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")
    """Key inside the Secret."""


class SecretRef(Struct):
    """A Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""


class Resources(Struct):
    """Compute resources of a container, as in a Pod."""

    requests: dict[LabelKey, Quantity] = Field(default_factory=dict, max_length=16)
    """Requested amounts by resource name."""
    limits: dict[LabelKey, Quantity] = Field(default_factory=dict, max_length=16)
    """Limits by resource name; GPUs go here, for example ``nvidia.com/gpu: 1``."""


class Toleration(Struct):
    """A toleration, as in a Pod."""

    key: str | None = Field(None, max_length=317)
    """Taint key; absent matches every key with operator Exists."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How key and value are compared."""
    value: str | None = Field(None, max_length=63)
    """Taint value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; absent matches all."""
    toleration_seconds: int | None = Field(None, ge=0)
    """How long a NoExecute taint is tolerated, in seconds."""


class Scheduling(Struct):
    """Where pods run and what image they run; part of ``job`` and ``serving``."""

    image: str | None = Field(None, min_length=1, max_length=512)
    """Runtime image. Absent: the one that the operator was installed with."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled."""
    image_pull_secrets: list[SecretRef] = Field(default_factory=list, max_length=8)
    """Secrets for private registries."""
    resources: Resources = Field(default_factory=Resources)
    """CPU, memory and GPUs of the container."""
    node_selector: dict[LabelKey, Label] = Field(default_factory=dict, max_length=32)
    """Labels that the node must have."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=16)
    """Taints that the pods tolerate."""
    priority_class_name: ObjectName | None = None
    """Priority class of the pods."""
    runtime_class_name: ObjectName | None = None
    """Runtime class of the pods, for example ``nvidia``."""


class ModelCache(Struct):
    """Volume that keeps downloaded model weights between pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!(has(self.claimName) && has(self.size))",
                "set claimName (an existing claim) or size (a new one), not both",
            )
        )
    )

    claim_name: ObjectName | None = None
    """Existing PersistentVolumeClaim; may be shared by several resources (ReadWriteMany)."""
    size: Quantity | None = None
    """Size of a claim made for this resource. Neither set: weights are kept in the pod only."""
    storage_class_name: ObjectName | None = None
    """Storage class of the new claim; the cluster's default when absent."""


class Model(Struct):
    """The language model, as vLLM takes it."""

    id: str = Field(min_length=1, max_length=512, pattern=r"^[^\s]+$")
    """Hub id, ``builtin:smollm2-135m``, or an absolute folder inside the model cache volume
    (``/models/...``)."""
    revision: str | None = Field(None, min_length=1, max_length=128)
    """Commit, tag or branch of a hub id. Pin it: a moved branch means encoding again."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """vLLM dtype of weights and KV."""
    max_model_len: int | None = Field(None, ge=256, le=10_000_000)
    """Longest prompt plus answer in tokens; the model's own when absent."""
    token_secret_ref: SecretKeyRef | None = None
    """Hub token for gated models."""
    cache: ModelCache = Field(default_factory=ModelCache)
    """Where weights are kept."""


class Condition(Struct):
    """One observed condition, as ``metav1.Condition``."""

    type: str = Field(max_length=316)
    """Name of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str = Field(min_length=1, max_length=1024)
    """CamelCase word for programs."""
    message: str = Field("", max_length=32768)
    """Sentence for people: field, value and mend."""
    observed_generation: int = Field(0, ge=0)
    """Generation of the spec that this was computed from."""
    last_transition_time: str = Field("", max_length=32, json_schema_extra={"format": "date-time"})
    """When the status last changed, RFC 3339."""


ConditionList = Annotated[
    list[Condition],
    Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]
