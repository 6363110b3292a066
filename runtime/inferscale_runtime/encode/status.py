"""How far an encoding job is: for ``/inferscale/v1/status``, ``/metrics`` and standard error.

The HTTP server runs in threads of its own and starts before anything heavy is imported. No figure
names a user.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, TextIO

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from inferscale_runtime import __version__
from inferscale_runtime.errors import ConfigError

State = Literal["loading", "reading_input", "committing_facts", "encoding", "done", "failed"]
STATES: tuple[State, ...] = (
    "loading",
    "reading_input",
    "committing_facts",
    "encoding",
    "done",
    "failed",
)
LINE_SECONDS = 10.0
"""Least time between two progress lines, so that a pod's log stays short (arbitrary)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Figures of one moment; those of this shard only.

    Attributes:
        state: What the job does.
        shard: ``i/n``.
        users: Users of this shard in the input.
        facts: Their facts.
        encoded: Facts read in this run.
        pending: Facts that are still to be read.
        tokens: Tokens read in this run, context included.
        tokens_per_second: Over the time since reading began.
        seconds: Since the process began.
        fingerprint: Digest, None until it is known.
    """

    state: State
    shard: str
    users: int
    facts: int
    encoded: int
    pending: int
    tokens: int
    tokens_per_second: float
    seconds: float
    fingerprint: str | None


class EncodeStatus:
    """What the job reports and the server shows; safe to use from several threads."""

    def __init__(self, shard: str = "0/1", clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._started = clock()
        self._reading_since: float | None = None
        self._shard = shard
        self._state: State = "loading"
        self._counts = dict.fromkeys(("users", "facts", "encoded", "pending", "tokens"), 0)
        self._fingerprint: str | None = None

    def enter(self, state: State, *, fingerprint: str | None = None, **counts: int) -> None:
        """Begins the next stage.

        Args:
            state: The stage.
            fingerprint: Digest, once it is known.
            **counts: New values of ``users``, ``facts`` and ``pending``.
        """
        with self._lock:
            self._state = state
            self._fingerprint = fingerprint or self._fingerprint
            self._counts.update(counts)
            if state == "encoding" and self._reading_since is None:
                self._reading_since = self._clock()

    def add(self, tokens: int) -> None:
        """One more fact was read."""
        with self._lock:
            self._counts["encoded"] += 1
            self._counts["pending"] -= 1
            self._counts["tokens"] += tokens

    def snapshot(self) -> Snapshot:
        """The figures now."""
        with self._lock:
            now = self._clock()
            reading = now - self._reading_since if self._reading_since is not None else 0.0
            rate = self._counts["tokens"] / reading if reading > 0 else 0.0
            return Snapshot(
                state=self._state,
                shard=self._shard,
                tokens_per_second=round(rate, 1),
                seconds=round(now - self._started, 3),
                fingerprint=self._fingerprint,
                **self._counts,
            )


class _Collector:
    def __init__(self, status: EncodeStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        now = self._status.snapshot()
        prefix = "inferscale_encode_"
        for name, text, value in (
            ("users", "Users of this shard in the input.", now.users),
            ("facts", "Their facts.", now.facts),
            ("pending_facts", "Facts that are still to be read.", now.pending),
            ("tokens_per_second", "Tokens read a second, context included.", now.tokens_per_second),
            ("seconds", "Seconds since the process began.", now.seconds),
        ):
            yield GaugeMetricFamily(prefix + name, text, value)
        yield CounterMetricFamily(prefix + "encoded_facts", "Facts read in this run.", now.encoded)
        yield CounterMetricFamily(prefix + "tokens", "Tokens read in this run.", now.tokens)
        state = GaugeMetricFamily(prefix + "state", "1 for the present stage.", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(name == now.state))
        yield state


class StatusServer:
    """Serves an ``EncodeStatus`` by HTTP until the process ends.

    Args:
        status: What to show.
        host: Address to listen on.
        port: Port, 0 for any free one.

    Raises:
        ConfigError: When the address cannot be used.
    """

    def __init__(self, status: EncodeStatus, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(_Collector(status))

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/inferscale/v1/status":
                    body = json.dumps({"version": __version__, **asdict(status.snapshot())})
                    self._answer(200, "application/json", body.encode())
                elif path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                else:
                    self._answer(404, "text/plain", b"try /inferscale/v1/status or /metrics\n")

            def _answer(self, code: int, kind: str, body: bytes) -> None:
                self.send_response(code)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """A probe each few seconds is no news."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that has gone is no news either, and no traceback."""
                if not isinstance(sys.exc_info()[1], ConnectionError):
                    super().handle_error(request, client_address)

        try:
            self._server = Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"--status-port {port} on --status-host '{host}' cannot be used: {reason}; choose "
                "another port or address"
            ) from error
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()


class ProgressLines:
    """Shows progress on standard error: a bar on a terminal, else now and then a line."""

    def __init__(
        self,
        status: EncodeStatus,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status = status
        self._stream = stream or sys.stderr
        self._clock = clock
        self._last = clock()
        self._bar: Any = None

    def start(self, total: int) -> None:
        """Begins to show ``total`` facts."""
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="fact", file=self._stream)

    def step(self) -> None:
        """One fact was read."""
        if self._bar is not None:
            rate = self._status.snapshot().tokens_per_second
            self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            self._bar.update()
        elif self._clock() - self._last >= LINE_SECONDS:
            self._last = self._clock()
            now = self._status.snapshot()
            print(
                f"encode: {now.encoded} of {now.encoded + now.pending} facts read, "
                f"{now.tokens_per_second:.0f} tokens/s, {now.seconds:.0f} s",
                file=self._stream,
                flush=True,
            )

    def stop(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
