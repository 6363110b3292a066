"""An OTLP collector in this process: keeps the spans that are sent to it over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """A span as it was sent."""

    name: str
    trace: str
    id: str
    parent: str
    process: str
    attributes: dict[str, str]


@dataclass
class Collector:
    """The spans so far.

    Attributes:
        endpoint: Where to send them.
        bodies: What was received, raw.
    """

    endpoint: str
    spans: list[Span] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Settings of the sender: this protocol, and soon."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def of_trace(self, trace: str) -> list[Span]:
        return [span for span in list(self.spans) if span.trace == trace]

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            process = _values(resource.resource.attributes).get("vllm.process_id", "")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Span(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            process,
                            _values(span.attributes),
                        )
                    )


def _values(attributes: Any) -> dict[str, str]:
    return {
        item.key: str(getattr(item.value, item.value.WhichOneof("value"))) for item in attributes
    }


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}/v1/traces")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield collector
        finally:
            server.shutdown()
