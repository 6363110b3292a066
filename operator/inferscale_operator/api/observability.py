"""``PersonalizedModel.spec.observability``: where traces of the servers go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from inferscale_operator.api.rules import Struct


class Tracing(Struct):
    """OpenTelemetry traces of the servers, from the HTTP request to the injection.

    vLLM's own spans are in them. They hold no user, fact or question.
    """

    endpoint: str = Field(min_length=1, max_length=1024, pattern=r"^https?://[^\s@]+$")
    """OTLP endpoint of a collector, for example ``http://collector.monitoring:4317``, or
    ``http://collector.monitoring:4318/v1/traces`` with protocol ``http/protobuf``."""
    protocol: Literal["grpc", "http/protobuf"] = "grpc"
    """What the collector understands there. With grpc the connection is not encrypted."""
    sample_ratio: float = Field(0.1, ge=0, le=1)
    """Share of the requests that are traced, of those that bring no decision of their caller's."""


class Observability(Struct):
    """What is told of the servers, beside metrics."""

    tracing: Tracing | None = None
    """Traces; absent: none."""


__all__ = ["Observability", "Tracing"]
