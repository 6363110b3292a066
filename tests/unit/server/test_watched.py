"""The engine client as the chat handler sees it: first tokens, and the trace that goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inferscale_runtime import tracing
from inferscale_runtime.server import metrics
from inferscale_runtime.server.watched import WATCH, Watch, WatchedEngine, watched_handler


class Engine:
    """Gives outputs as vLLM's client does; remembers what it was asked and whether it was left."""

    errored = False

    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs
        self.trace_headers: Any = None
        self.closed = False

    async def generate(self, *_: Any, trace_headers: Any = None) -> AsyncIterator[Any]:
        self.trace_headers = trace_headers
        try:
            for output in self.outputs:
                yield output
        finally:
            self.closed = True


def output(*, finished: bool = False, arrival: float = 0.0, latency: float = 0.0) -> Any:
    stats = SimpleNamespace(arrival_time=arrival, first_token_latency=latency)
    return SimpleNamespace(finished=finished, metrics=stats if latency else None)


def observed(mode: str) -> tuple[float, float]:
    samples = {
        sample.name.rpartition("_")[2]: sample.value
        for metric in metrics.FIRST_TOKEN_SECONDS.collect()
        for sample in metric.samples
        if sample.labels == {"mode": mode}
    }
    return samples.get("count", 0.0), samples.get("sum", 0.0)


async def read(engine: Engine, mode: str, arrival: float) -> list[Any]:
    token = WATCH.set(Watch(mode, arrival))
    try:
        return [item async for item in WatchedEngine(engine).generate("prompt")]
    finally:
        WATCH.reset(token)


def test_the_first_output_counts_once() -> None:
    engine = Engine(output(arrival=100.5, latency=0.25), output(arrival=100.5, latency=0.25))
    assert asyncio.run(read(engine, "first", 100.0)) == list(engine.outputs)
    # Half a second before vLLM, a quarter of one inside.
    assert observed("first") == (1, pytest.approx(0.75))


def test_without_figures_only_a_stream_tells_its_first_token() -> None:
    asyncio.run(read(Engine(output(finished=True)), "whole", 0.0))
    assert observed("whole")[0] == 0
    asyncio.run(read(Engine(output(), output(finished=True)), "streamed", time.time()))
    assert observed("streamed")[0] == 1


def test_a_request_that_is_left_leaves_the_engine() -> None:
    engine = Engine(output(), output())

    async def leave() -> None:
        WATCH.set(Watch("left", 0.0))
        outputs = WatchedEngine(engine).generate("prompt")
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    assert engine.closed


def test_everything_else_is_the_engines_and_the_handler_stays() -> None:
    handler = SimpleNamespace(engine_client=Engine())
    watched = watched_handler(handler)
    assert watched.engine_client.errored is False
    assert isinstance(handler.engine_client, Engine)
    asyncio.run(read(handler.engine_client, "none", 0.0))
    engine = Engine()

    async def ask() -> None:
        async for _ in WatchedEngine(engine).generate("p", trace_headers={"traceparent": "t"}):
            pass

    asyncio.run(ask())
    assert engine.trace_headers == {"traceparent": "t"}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", lambda: provider.get_tracer("test"))
    return exporter


def test_the_engine_and_its_workers_go_below_the_request(spans: InMemorySpanExporter) -> None:
    engine = Engine()

    @tracing.traced("inner")
    async def inner() -> None:
        tracing.annotate(count=3, reason=None)

    async def ask() -> None:
        await inner()  # outside a request there is no trace
        with tracing.server_span("POST /x", {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}):
            await inner()
            async for _ in WatchedEngine(engine).generate("p"):
                pass

    asyncio.run(ask())
    with tracing.span_under(tracing.picked_headers(engine.trace_headers), "load", tokens=7):
        pass
    with tracing.span_under((), "none"):
        pass
    found = {span.name: span for span in spans.get_finished_spans()}
    assert found.keys() == {"inner", "POST /x", "load"}
    request = found["POST /x"]
    assert request.parent is not None
    assert request.parent.span_id == int("b" * 16, 16)
    for name in ("inner", "load"):
        parent = found[name].parent
        assert parent is not None
        assert parent.span_id == request.context.span_id
    assert dict(found["inner"].attributes or {}) == {"inferscale.count": 3}
    assert dict(found["load"].attributes or {}) == {"inferscale.tokens": 7}


def test_a_failure_is_told_by_its_type_alone(spans: InMemorySpanExporter) -> None:
    @tracing.traced("inner")
    async def inner() -> None:
        raise ValueError("my dog is called Biscuit")

    async def ask() -> None:
        with tracing.server_span("POST /x", {}):
            await inner()

    with pytest.raises(ValueError, match="Biscuit"):
        asyncio.run(ask())
    for span in spans.get_finished_spans():
        assert "Biscuit" not in span.to_json()
        assert span.status.description == "ValueError"
