"""``PersonalizedModel``: a served model that uses one or more memory stores."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from inferscale_operator.api.auth import Auth
from inferscale_operator.api.autoscaling import Autoscaling, AutoscalingStatus
from inferscale_operator.api.base import (
    ConditionList,
    Model,
    NamespaceName,
    ObjectName,
    Scheduling,
    StoreName,
)
from inferscale_operator.api.canary import Canary, StoreCanaryStatus
from inferscale_operator.api.observability import Observability
from inferscale_operator.api.routing import Routing
from inferscale_operator.api.rules import Resource, Rule, Struct
from inferscale_operator.api.store_status import StoreFacts
from inferscale_operator.api.tiers import BudgetStatus, PlacementStatus, Tiers
from inferscale_runtime.budget import exact_quantity

OWNED_FLAGS = (
    "--model",
    "--store",
    "--config",
    "--host",
    "--port",
    "--dtype",
    "--served-model-name",
    "--revision",
    "--max-model-len",
    "--tensor-parallel-size",
    "-tp",
    "--kv-transfer-config",
    "--api-server-count",
    "--shutdown-timeout",
    "--api-key",
    "--otlp-traces-endpoint",
)
"""vLLM flags that have a field of their own, or that injection depends on."""


UNSUPPORTED_FLAGS = (
    "--pipeline-parallel-size",
    "-pp",
    "--enable-lora",
    "--speculative-config",
    "--headless",
    "--uds",
    "--ssl-keyfile",
    "--ssl-certfile",
)
"""vLLM flags with which injection, or the probes and the Service, do not work."""


def _flag_rule(flags: tuple[str, ...], message: str) -> Rule:
    """None of these flags is among the arguments.

    vLLM takes ``_`` for ``-`` in names, ``--flag=value``, and ``--flag.key value`` for parts of
    JSON values.
    """
    names = ", ".join(f"'{flag}'" for flag in flags)

    def is_named(argument: str) -> bool:
        return re.split(r"[=.]", argument, maxsplit=1)[0].replace("_", "-") in flags

    return Rule(
        cel=(
            "!self.exists(a, a.startsWith('-') &&"
            f" a.split('=', 2)[0].split('.', 2)[0].replace('_', '-') in [{names}])"
        ),
        message=f"{message}: {' '.join(flags)}",
        holds=lambda arguments: not any(is_named(argument) for argument in arguments),
    )


_OWNED_RULE = _flag_rule(OWNED_FLAGS, "must not hold a flag that has a field of its own")
_UNSUPPORTED_RULE = _flag_rule(
    UNSUPPORTED_FLAGS, "must not hold a flag that injection or the pod's port cannot work with"
)


class StoreReference(Struct):
    """A MemoryStore of the same namespace."""

    name: StoreName
    """Name of the MemoryStore."""


_NO_DUPLICATES = Rule(
    cel="",
    message="a store is named twice; remove one",
    holds=lambda stores: len({store.name for store in stores}) == len(stores),
)


class Retrieval(Struct):
    """Which facts a request gets when its body does not say."""

    rules = (
        Rule(
            cel="self.linkTail <= self.topK",
            message="linkTail must not be above topK",
            holds=lambda self: self.link_tail <= self.top_k,
        ),
    )

    top_k: int = Field(20, ge=0, le=1000)
    """Facts per request."""
    link_tail: int = Field(0, ge=0, le=1000)
    """How many of the best facts are prefilled over the injected rest instead of being injected."""
    min_score: float | None = Field(None, ge=-1, le=1)
    """Facts below this similarity are left out; absent keeps all."""
    order: Literal["relevance", "stored"] = "relevance"
    """``relevance`` puts the best fact last, ``stored`` keeps the order of learning."""
    unknown_user: Literal["empty", "error"] = "empty"
    """What an unknown user means: no memory, or HTTP 404."""


class Serving(Scheduling):
    """The server pods."""

    rules = (
        Rule(
            cel=(
                "!has(self.resources) || !has(self.resources.limits) ||"
                " self.resources.limits.all(k, !k.endsWith('.com/gpu') ||"
                " int(string(self.resources.limits[k])) >= self.tensorParallelSize)"
            ),
            message="resources.limits must hold at least tensorParallelSize GPUs",
            holds=lambda self: all(
                exact_quantity(amount) >= self.tensor_parallel_size
                for name, amount in self.resources.limits.items()
                if name.endswith(".com/gpu")
            ),
        ),
    )

    replicas: int = Field(1, ge=0, le=1000)
    """Server pods. With an autoscaler it is written by that, through the scale subresource."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """GPUs of one server. Must divide the model's KV heads."""
    engine_args: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]], _OWNED_RULE, _UNSUPPORTED_RULE
    ] = Field(default_factory=list, max_length=64)
    """Further arguments of vLLM's server, one word each."""
    shutdown_timeout_seconds: int = Field(60, ge=0, le=3600)
    """How long a stopping server may finish the answers that it has begun (vLLM's
    ``--shutdown-timeout``). The pods' grace period is longer."""
    startup_timeout_seconds: int = Field(1800, ge=30, le=86_400)
    """How long a server may take to become ready before it is started again."""
    spread: Literal["None", "Node", "Zone"] = "Node"
    """Pods are spread over nodes or zones where possible."""


class Disruption(Struct):
    """What voluntary disruptions (node drains) may take away."""

    max_unavailable: int = Field(1, ge=1, le=1000)
    """Most pods that may be down at once. A PodDisruptionBudget exists from two replicas on."""


class NetworkAccess(Struct):
    """Who may reach the server pods, kept by a NetworkPolicy."""

    enabled: bool = True
    """False makes no NetworkPolicy."""
    namespaces: list[NamespaceName] = Field(
        default_factory=list,
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    """Namespaces whose pods may call the server, beside its own."""


class PersonalizedModelSpec(Struct):
    """Desired state of a served model."""

    model: Model
    """The model; the same as in every one of its stores."""
    memory_stores: Annotated[list[StoreReference], _NO_DUPLICATES] = Field(
        min_length=1,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Stores that requests may use; the first that knows the user, or the one that the request
    names."""
    retrieval: Retrieval = Field(default_factory=Retrieval)
    """Defaults of retrieval."""
    tiers: Tiers = Field(default_factory=Tiers)
    """Where KV is kept."""
    serving: Serving = Field(default_factory=Serving)
    """The server pods."""
    autoscaling: Autoscaling = Field(default_factory=Autoscaling)
    """Scaling."""
    canary: Canary | None = None
    """Check of injected answers against text; the servers' own defaults when absent."""
    auth: Auth = Field(default_factory=Auth)
    """Who may call the server."""
    disruption: Disruption = Field(default_factory=Disruption)
    """Voluntary disruptions."""
    network: NetworkAccess = Field(default_factory=NetworkAccess)
    """Network access."""
    routing: Routing = Field(default_factory=Routing)
    """Which server a request goes to."""
    observability: Observability = Field(default_factory=Observability)
    """Traces."""


class ServedGeneration(Struct):
    """One generation of servers: a model with one fingerprint for each store."""

    name: str = Field(max_length=253)
    """Name of its Deployment."""
    hash: str = Field(max_length=64)
    """Digest of what makes it a generation of its own."""
    ready_replicas: int = Field(0, ge=0)
    """Ready pods."""


class StorePending(Struct):
    """Facts of one store that wait for their KV."""

    name: ObjectName
    """Name of the MemoryStore."""
    facts: int = Field(0, ge=0)
    """How many."""


class PersonalizedModelStatus(Struct):
    """Observed state."""

    observed_generation: int = Field(0, ge=0)
    """Generation of the spec that this status belongs to."""
    conditions: ConditionList
    """``StoresReady``, ``Compatible``, ``ServerAvailable``, ``RolledOut``, the summary ``Ready``,
    and, which are no part of it, ``MetricsFresh``, ``Degraded``, ``RouterReady``,
    ``MetricsAvailable``, ``ScalingReady`` and ``ActivatorReady``."""
    replicas: int = Field(0, ge=0)
    """Pods of the generation that gets the traffic."""
    ready_replicas: int = Field(0, ge=0)
    """Ready pods of that generation."""
    selector: str = Field("", max_length=1024)
    """Label selector of the pods, for autoscalers."""
    serving: ServedGeneration | None = None
    """The generation that gets the traffic."""
    next: ServedGeneration | None = None
    """The generation that is coming up beside it."""
    facts: StoreFacts = Field(default_factory=StoreFacts)
    """Counts over all stores."""
    pending_facts: list[StorePending] = Field(default_factory=list, max_length=16)
    """Facts that wait for their KV, for stores that are written through the memory API."""
    endpoint: str = Field("", max_length=1024)
    """Address of the server inside the cluster."""
    tier: str = Field("", max_length=64)
    """Memory for KV in each pod, for example ``dram 1Gi``, or ``gpu 8Gi, dram 50Gi``."""
    autoscaling: AutoscalingStatus | None = None
    """What scaling remembers."""
    placement: PlacementStatus | None = None
    """Which store is kept where."""
    canary: list[StoreCanaryStatus] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """How far injected answers are from text, by store, where servers have scored them."""
    budget: BudgetStatus | None = None
    """Division of memory, where GPUs are asked for and their size is known."""


class PersonalizedModel(Resource):
    """A served model with injected memory."""

    name_pattern = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

    spec: PersonalizedModelSpec
    status: PersonalizedModelStatus = Field(default_factory=PersonalizedModelStatus)


__all__ = [
    "OWNED_FLAGS",
    "UNSUPPORTED_FLAGS",
    "Auth",
    "Autoscaling",
    "Disruption",
    "NetworkAccess",
    "ObjectName",
    "PersonalizedModel",
    "PersonalizedModelSpec",
    "PersonalizedModelStatus",
    "Retrieval",
    "ServedGeneration",
    "Serving",
    "StoreReference",
    "Tiers",
]
