"""OpenTelemetry spans of ours, in the traces that vLLM writes.

vLLM makes the exporter in each of its processes (``--otlp-traces-endpoint``); without one, every
call here does nothing. Attributes hold counts, modes and reasons: never a fact, a question or a
user, who might be read from a trace store by people who may not read memories.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TraceHeaders = tuple[tuple[str, str], ...]
"""W3C trace context as header fields: ``traceparent``, and ``tracestate`` if there is one."""

_PROPAGATOR = TraceContextTextMapPropagator()
P = ParamSpec("P")
R = TypeVar("R")


def _tracer() -> trace.Tracer:
    # Asked for each time: vLLM sets the provider after this module was imported.
    return trace.get_tracer("inferscale")


@contextmanager
def _span(
    name: str, context: Context | None = None, kind: trace.SpanKind = trace.SpanKind.INTERNAL
) -> Iterator[trace.Span]:
    # Messages of exceptions may quote what a span must not hold: the type has to do.
    with _tracer().start_as_current_span(
        name, context, kind, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except Exception as error:
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise


@contextmanager
def server_span(name: str, headers: Mapping[str, str]) -> Iterator[trace.Span]:
    """The span of an HTTP request; continues the caller's trace.

    Args:
        name: Method and route.
        headers: Of the request, names in lower case.
    """
    with _span(name, _PROPAGATOR.extract(headers), trace.SpanKind.SERVER) as span:
        yield span


@contextmanager
def span_under(headers: TraceHeaders, name: str, **attributes: str | int) -> Iterator[None]:
    """A span below one of another process; nothing without a trace.

    Args:
        headers: What ``current_headers`` gave there; empty for no trace.
        name: Of the span.
        **attributes: ``inferscale.`` is put before their names.
    """
    if not headers:
        yield
        return
    with _span(name, _PROPAGATOR.extract(dict(headers))):
        annotate(**attributes)
        yield


def traced(name: str) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Decorator: a coroutine function runs in a span of this name; outside a trace, in none."""

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        @functools.wraps(function)
        async def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if not trace.get_current_span().get_span_context().is_valid:
                return await function(*args, **kwargs)
            with _span(name):
                return await function(*args, **kwargs)

        return wrapper

    return decorate


def annotate(**attributes: str | int | None) -> None:
    """Puts attributes on the current span; those that are None are left out."""
    span = trace.get_current_span()
    if span.is_recording():
        known = {f"inferscale.{k}": v for k, v in attributes.items() if v is not None}
        span.set_attributes(known)


def current_headers() -> TraceHeaders:
    """The current span for another process; empty outside a trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items())


def picked_headers(headers: Mapping[str, Any] | None) -> TraceHeaders:
    """The trace context among header fields, as vLLM hands them to the engine."""
    found = headers or {}
    return tuple((name, str(found[name])) for name in sorted(_PROPAGATOR.fields) if name in found)
