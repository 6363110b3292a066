"""What both kinds share: base model, quantities, references, conditions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from inferscale_operator.api.rules import MAX_NAME_LENGTH, Rule, Struct
from inferscale_runtime.budget import exact_quantity

GROUP = "inferscale.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,2}|[numkMGTPE]|[KMGTPE]i)?$"
LABEL_KEY_PATTERN = (
    r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)


def at_least(least: str) -> Rule:
    """A quantity must not be below another one."""
    return Rule(
        cel=f"quantity(string(self)).compareTo(quantity('{least}')) >= 0",
        message=f"must be at least {least}",
        holds=lambda value: exact_quantity(value) >= exact_quantity(least),
    )


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


Size = Annotated[Quantity, at_least("1Mi")]
"""A quantity of bytes of at least 1 MiB: catches a forgotten suffix."""

Label = Annotated[
    str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
]
LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=LABEL_KEY_PATTERN)]
NamespaceName = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]


NO_PARENT_FOLDER = Rule(
    cel="!self.contains('..')",
    message="must not contain '..'",
    holds=lambda value: ".." not in value,
)


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

    rules = (
        Rule(
            cel=(
                "!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in"
                " self.limits) || quantity(string(self.requests[k]))"
                ".compareTo(quantity(string(self.limits[k]))) <= 0)"
            ),
            message="requests must not be above limits",
            holds=lambda self: all(
                exact_quantity(amount) <= exact_quantity(self.limits.get(name, amount))
                for name, amount in self.requests.items()
            ),
        ),
    )

    requests: dict[LabelKey, Quantity] = Field(default_factory=dict, max_length=16)
    """Requested amounts by resource name."""
    limits: dict[LabelKey, Quantity] = Field(default_factory=dict, max_length=16)
    """Limits by resource name; GPUs go here, for example ``nvidia.com/gpu: 1``."""


class Toleration(Struct):
    """A toleration, as in a Pod."""

    rules = (
        Rule(
            cel="has(self.key) || self.operator == 'Exists'",
            message="without key, operator must be Exists",
            holds=lambda self: self.key is not None or self.operator == "Exists",
        ),
        Rule(
            cel="!has(self.value) || self.operator == 'Equal'",
            message="value is for operator Equal; remove it",
            holds=lambda self: self.value is None or self.operator == "Equal",
        ),
        Rule(
            cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            message="tolerationSeconds is for effect NoExecute",
            holds=lambda self: self.toleration_seconds is None or self.effect == "NoExecute",
        ),
    )

    key: LabelKey | None = None
    """Taint key; absent matches every key with operator Exists."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How key and value are compared."""
    value: Label | None = None
    """Taint value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; absent matches all."""
    toleration_seconds: int | None = Field(None, ge=0, le=31_536_000)
    """How long a NoExecute taint is tolerated, in seconds."""


class Scheduling(Struct):
    """Where pods run and what image they run; part of ``job`` and ``serving``."""

    image: str | None = Field(None, min_length=1, max_length=512, pattern=r"^[a-zA-Z0-9]\S*$")
    """Runtime image. Absent: the one that the operator was installed with."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled."""
    image_pull_secrets: list[SecretRef] = Field(
        default_factory=list,
        max_length=8,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
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

    rules = (
        Rule(
            cel="!(has(self.claimName) && has(self.size))",
            message="set claimName (an existing claim) or size (a new one), not both",
            holds=lambda self: self.claim_name is None or self.size is None,
        ),
        Rule(
            cel="!has(self.storageClassName) || has(self.size)",
            message="storageClassName is for a claim made by the operator; set size or remove it",
            holds=lambda self: self.storage_class_name is None or self.size is not None,
        ),
    )

    claim_name: ObjectName | None = None
    """Existing PersistentVolumeClaim; may be shared by several resources (ReadWriteMany)."""
    size: Size | None = None
    """Size of a claim made for this resource. Neither set: weights are kept in the pod only."""
    storage_class_name: ObjectName | None = None
    """Storage class of the new claim; the cluster's default when absent."""


class Model(Struct):
    """The language model, as vLLM takes it."""

    rules = (
        Rule(
            cel="!has(self.revision) || !self.id.matches('^(/|builtin:)')",
            message="revision is for hub ids; remove it",
            holds=lambda self: self.revision is None or not self.id.startswith(("/", "builtin:")),
        ),
        Rule(
            cel=(
                "!self.id.startsWith('/models/') || (has(self.cache) &&"
                " (has(self.cache.claimName) || has(self.cache.size)))"
            ),
            message=(
                "a folder below /models lies in the model cache volume;"
                " set cache.claimName to the claim that holds it"
            ),
            holds=lambda self: not self.id.startswith("/models/")
            or self.cache.claim_name is not None
            or self.cache.size is not None,
        ),
    )

    id: Annotated[
        str, Field(min_length=1, max_length=512, pattern=r"^[a-zA-Z0-9/]\S*$"), NO_PARENT_FOLDER
    ]
    """Hub id, ``builtin:smollm2-135m``, or an absolute folder: in the model cache volume
    (``/models/...``), or in the image."""
    revision: str | None = Field(
        None, min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9][-a-zA-Z0-9._/]*$"
    )
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

    type: str = Field(min_length=1, max_length=316)
    """Name of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str = Field(
        min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
    )
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
