"""What vLLM's chat handler does in the engine, watched: first tokens, and the trace handed on.

The handler is copied and given an engine client that tells; vLLM's own handler is left as it is.
Runs on the API process's event loop.
"""

from __future__ import annotations

import copy
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from inferscale_runtime import tracing
from inferscale_runtime.server import metrics

ARRIVAL = "inferscale.arrival"
"""Key in the ASGI scope: when the request's last byte was there, Unix time in seconds."""


@dataclass(frozen=True, slots=True)
class Watch:
    """A request whose first token is waited for.

    Attributes:
        mode: As in ``usage.memory``.
        arrival: When it was complete, Unix time in seconds.
    """

    mode: str
    arrival: float

    def observe(self, output: Any) -> None:
        """Takes the first output of the request.

        Args:
            output: vLLM's ``RequestOutput``. That of an answer which is not streamed comes with the
                last token; its figures say when the first one was there.
        """
        stats = output.metrics
        if stats is not None and stats.first_token_latency:
            seconds = stats.arrival_time + stats.first_token_latency - self.arrival
        elif not output.finished:  # vLLM keeps no figures with --disable-log-stats
            seconds = time.time() - self.arrival
        else:
            return
        metrics.FIRST_TOKEN_SECONDS.labels(self.mode).observe(max(0.0, seconds))


WATCH: ContextVar[Watch | None] = ContextVar("inferscale_watch", default=None)
"""Set by the route before it calls the handler."""


class WatchedEngine:
    """vLLM's engine client; everything but ``generate`` is handed through."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *args: Any, trace_headers: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
        """As vLLM's; spans of the engine go below the request's."""
        headers = dict(tracing.current_headers()) or trace_headers
        outputs = self._engine.generate(*args, trace_headers=headers, **kwargs)
        watch = WATCH.get()
        return outputs if watch is None else _follow(outputs, watch)


async def _follow(outputs: Any, watch: Watch) -> AsyncIterator[Any]:
    first = True
    async with aclosing(outputs):
        async for output in outputs:
            if first:
                first = False
                watch.observe(output)
            yield output


def watched_handler(handler: Any) -> Any:
    """A copy of the chat handler with a watched engine client."""
    watched = copy.copy(handler)
    watched.engine_client = WatchedEngine(handler.engine_client)
    return watched
