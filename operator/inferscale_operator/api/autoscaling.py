"""How many replicas a model gets: what is asked for, and what the status says of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from inferscale_operator.api.rules import Rule, Struct

TIME: dict[str, JsonValue] = {"format": "date-time"}


class AutoscalingTarget(Struct):
    """What one replica should carry. Of several wishes the largest wins."""

    requests: int = Field(8, ge=1, le=100_000)
    """Running and waiting requests per replica."""
    kv_cache_percent: int | None = Field(None, ge=1, le=100)
    """Use of vLLM's KV cache. Absent: it does not matter."""
    ttft_p95_ms: int | None = Field(None, ge=1, le=3_600_000)
    """95th percentile of the time to first token in milliseconds. Absent: it does not matter."""


class ScalingBehavior(Struct):
    """How fast provider ``operator`` follows, and ``keda`` and ``hpa`` scale down."""

    up_seconds: int = Field(0, ge=0, le=3600)
    """How long more replicas must have been wished for."""
    down_seconds: int = Field(300, ge=0, le=86_400)
    """How long fewer replicas must have been wished for; the most that were wished for in this time
    stay."""
    tolerance_percent: int = Field(10, ge=0, le=50)
    """Smaller differences from a target change nothing."""


class ScaleToZero(Struct):
    """No server while nobody asks; an activator holds requests and wakes the model."""

    idle_seconds: int = Field(600, ge=1, le=604_800)
    """How long without a request before the last server goes. With provider ``keda`` it is KEDA's
    cooldown period."""
    max_held_requests: int = Field(100, ge=1, le=10_000)
    """Most requests that wait for a server; further ones get HTTP 503 with ``Retry-After``."""
    max_wait_seconds: int = Field(600, ge=1, le=3600)
    """Longest wait of a request; then it gets HTTP 503 with ``Retry-After``."""


class Autoscaling(Struct):
    """Scaling of replicas, through the scale subresource."""

    rules = (
        Rule(
            cel="self.minReplicas <= self.maxReplicas",
            message="minReplicas must not be above maxReplicas",
            holds=lambda self: self.min_replicas <= self.max_replicas,
        ),
        Rule(
            cel="self.minReplicas >= 1 || has(self.scaleToZero)",
            message="minReplicas 0 needs scaleToZero: without it nobody would hold requests",
            holds=lambda self: self.min_replicas >= 1 or self.scale_to_zero is not None,
        ),
        Rule(
            cel="self.provider != 'keda' || has(self.prometheusAddress)",
            message="provider keda needs prometheusAddress",
            holds=lambda self: self.provider != "keda" or self.prometheus_address is not None,
        ),
    )

    provider: Literal["none", "operator", "hpa", "keda"] = "none"
    """``operator`` asks the servers itself and needs nothing installed. ``hpa`` needs a metrics
    adapter that serves pods' metrics (docs/autoscaling.md), ``keda`` needs KEDA."""
    min_replicas: int = Field(1, ge=0, le=1000)
    """Fewest replicas; with ``scaleToZero`` fewest while the model is awake, and then 0 means 1."""
    max_replicas: int = Field(4, ge=1, le=1000)
    """Most replicas."""
    target: AutoscalingTarget = Field(default_factory=AutoscalingTarget)
    """What one replica should carry."""
    behavior: ScalingBehavior = Field(default_factory=ScalingBehavior)
    """How fast the size follows."""
    scale_to_zero: ScaleToZero | None = None
    """Present: no server while nobody asks. Works with every provider; with ``none`` the model
    wakes in its last size."""
    prometheus_address: str | None = Field(None, max_length=1024, pattern=r"^https?://[^\s@]+$")
    """Prometheus that KEDA asks."""

    @property
    def awake_minimum(self) -> int:
        """Fewest replicas while the model is awake."""
        return max(1, self.min_replicas)

    @property
    def watches_load(self) -> bool:
        """Whether servers are asked for their load."""
        return self.provider != "none" or self.scale_to_zero is not None


SignalName = Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[a-zA-Z0-9]+$")]
MetricName = Annotated[str, Field(min_length=1, max_length=128)]


class AutoscalingStatus(Struct):
    """What scaling remembers: an operator that starts anew goes on from here."""

    metric_names: dict[SignalName, MetricName] = Field(default_factory=dict, max_length=16)
    """vLLM's name of each signal, as a server was seen to have it."""
    cold_start_seconds: int | None = Field(None, ge=0)
    """Time that servers took from being made to being ready."""
    awake_replicas: int | None = Field(None, ge=0)
    """Last size that was not zero."""
    last_scale_time: str | None = Field(None, max_length=32, json_schema_extra=TIME)
    """When the operator last changed the size."""
    reason: str = Field("", max_length=1024)
    """Why, with the figures at the time."""
    up_since: str | None = Field(None, max_length=32, json_schema_extra=TIME)
    """Since when more replicas are wished for."""
    up_to: int | None = Field(None, ge=0)
    """The fewest of those wishes."""
    down_since: str | None = Field(None, max_length=32, json_schema_extra=TIME)
    """Since when fewer replicas are wished for."""
    down_to: int | None = Field(None, ge=0)
    """The most of those wishes."""
    idle_since: str | None = Field(None, max_length=32, json_schema_extra=TIME)
    """Since when no request was seen."""
