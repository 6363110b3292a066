"""Watching, by kopf, in a thread with an event loop of its own.

kopf only watches here: no handler of ours changes an object through it, so it adds no
annotations and no finalizers. A thread, because kopf stops foreign tasks of its loop when it
ends, and because watching can then be started again inside the process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import kopf
from kubernetes.aio.client.configuration import Configuration

from inferscale_operator.cluster.redact import trimmed
from inferscale_operator.desired.kinds import CHILD_KINDS, CUSTOM_KINDS, Kind, Manifest
from inferscale_operator.desired.naming import FIELD_MANAGER, MANAGED_BY
from inferscale_operator.handlers.observe import UNWATCHED_KINDS

WATCHED_KINDS = (*CUSTOM_KINDS, *(kind for kind in CHILD_KINDS if kind not in UNWATCHED_KINDS))
CHILD_SELECTOR = f"{MANAGED_BY}={FIELD_MANAGER}"

OnEvent = Callable[[Kind, str, Manifest], None]
"""Kind, ``DELETED`` or anything else, object without managed fields."""

_TASK_LOGGER = "kopf._core.reactor.orchestration"
"""Where kopf 1.45 says that the task of one watch has died. It goes on without it, and has no other
way of telling (kopf's issue 1276)."""
_TOKEN_MINUTES = 5
_log = logging.getLogger(__name__)


class WatchDiedError(Exception):
    """One of kopf's watches has ended for good; watching has to be started anew."""


class _Deaths(logging.Handler):
    """Tells of watches that died, by what kopf logs about them."""

    def __init__(self, on_death: Callable[[], None]) -> None:
        super().__init__(logging.ERROR)
        self._on_death = on_death

    def emit(self, record: logging.LogRecord) -> None:
        """Takes any error of the tasks for a death: starting anew costs a few lists."""
        self._on_death()


class _Backoffs:
    """Endless pauses between tries: kopf gives a watch up for good when they run out."""

    def __iter__(self) -> Iterator[float]:
        yield from (1, 1, 2, 3, 5, 8)
        while True:
            yield 10


@dataclasses.dataclass(frozen=True, slots=True)
class WatchSettings:
    """What to watch.

    Attributes:
        namespaces: Namespaces; empty for all.
        kinds: Kinds that the cluster serves.
        inactivity_seconds: A stream without an event or bookmark for so long is made again.
    """

    namespaces: Sequence[str]
    kinds: Sequence[Kind]
    inactivity_seconds: float = 70.0


class Watcher:
    """One run of kopf.

    Args:
        configuration: How to reach the API server.
        settings: What to watch.
        on_event: Called in the loop that made the watcher.
    """

    def __init__(
        self, configuration: Configuration, settings: WatchSettings, on_event: OnEvent
    ) -> None:
        self._configuration = configuration
        self._settings = settings
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._died = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="watching", daemon=True)

    def start(self) -> None:
        """Starts watching; returns at once."""
        self._thread.start()

    async def wait(self) -> None:
        """Waits until watching ended; raises what ended it."""
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """Ends watching."""
        self._stop.set()
        await asyncio.wait([self._ended], timeout=10)

    def _run(self) -> None:
        error: Exception | None = None
        deaths = _Deaths(self._on_death)
        logging.getLogger(_TASK_LOGGER).addHandler(deaths)
        try:
            asyncio.run(self._operator())
        except Exception as problem:
            error = problem
        finally:
            logging.getLogger(_TASK_LOGGER).removeHandler(deaths)
        if self._died:
            error = WatchDiedError()
        try:
            self._loop.call_soon_threadsafe(self._finish, error)
        except RuntimeError:
            pass  # the process ends and its loop is closed

    def _on_death(self) -> None:
        if not self._stop.is_set():
            self._died = True
            self._stop.set()

    def _finish(self, error: Exception | None) -> None:
        if self._ended.done():
            return
        if error is not None and (self._died or not self._stop.is_set()):
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _operator(self) -> None:
        await kopf.operator(
            registry=self._registry(),
            settings=_kopf_settings(self._settings),
            standalone=True,
            namespaces=list(self._settings.namespaces),
            clusterwide=not self._settings.namespaces,
            stop_flag=self._stop,
        )

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry, id="login")(self._login)
        for kind in self._settings.kinds:
            kopf.on.event(
                group=kind.group,
                version=kind.version,
                plural=kind.plural,
                registry=registry,
                id=f"watch-{kind.plural}",
            )(self._handler(kind))
        return registry

    def _handler(self, kind: Kind) -> Callable[..., Any]:
        async def handle(event: Any, **_: Any) -> None:
            # A copy without managed fields, made in this thread: kopf keeps the original.
            data = json.dumps(trimmed(kind, event["object"]))
            self._loop.call_soon_threadsafe(self._deliver, kind, str(event["type"] or ""), data)

        return handle

    def _deliver(self, kind: Kind, change: str, data: str) -> None:
        if not self._stop.is_set():
            self._on_event(kind, change, json.loads(data))

    async def _login(self, **_: Any) -> kopf.ConnectionInfo:
        return await connection(self._configuration)


async def connection(configuration: Configuration) -> kopf.ConnectionInfo:
    """The client's configuration in kopf's words; asked for again every five minutes."""
    value = await configuration.get_api_key_with_prefix("BearerToken")
    scheme, _, token = str(value or "").partition(" ")
    expiry = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=_TOKEN_MINUTES)
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert or None,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme="Bearer" if token else None,
        token=token or None,
        certificate_path=configuration.cert_file or None,
        private_key_path=configuration.key_file or None,
        proxy_url=configuration.proxy or None,
        expiration=expiry if scheme.lower() == "bearer" else None,
    )


def _kopf_settings(watch: WatchSettings) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.process.ultimate_exiting_timeout = None
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = _Backoffs()
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 30
    settings.watching.inactivity_timeout = watch.inactivity_seconds
    settings.watching.chunk_size = 500
    # A worker per object is kept for this long; a restart sees thousands of objects at once.
    settings.queueing.idle_timeout = 0.5
    for kind in watch.kinds:
        if kind not in CUSTOM_KINDS:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = (
                CHILD_SELECTOR
            )
    return settings
