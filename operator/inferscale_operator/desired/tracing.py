"""Settings by which a server sends its traces: one flag of vLLM, and OpenTelemetry's variables."""

from __future__ import annotations

from inferscale_operator.api.observability import Tracing
from inferscale_operator.desired import naming, pod
from inferscale_operator.desired.kinds import Manifest


def tracing_arguments(tracing: Tracing | None) -> list[str]:
    """Arguments of vLLM's server."""
    if tracing is None:
        return []
    return ["--otlp-traces-endpoint", pod.literal(tracing.endpoint)]


def tracing_environment(owner: naming.Owner, tracing: Tracing | None) -> list[Manifest]:
    """Variables that OpenTelemetry's library reads.

    Args:
        owner: The PersonalizedModel; its name is the service's.
        tracing: Of the spec.
    """
    if tracing is None:
        return []
    metadata = owner["metadata"]
    values = {
        "OTEL_SERVICE_NAME": metadata["name"],
        "OTEL_RESOURCE_ATTRIBUTES": f"k8s.namespace.name={metadata['namespace']}",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": tracing.protocol,
        # A caller's decision holds; otherwise every process would make its own.
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(tracing.sample_ratio),
    }
    return [{"name": name, "value": value} for name, value in values.items()]
