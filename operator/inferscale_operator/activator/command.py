"""``inferscale-operator activator``: one process for one model that scales to zero."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, disable_created_metrics

from inferscale_operator.activator.admission import Admission
from inferscale_operator.activator.application import Activator
from inferscale_operator.activator.forwarding import new_session
from inferscale_operator.activator.metrics import ActivatorMetrics
from inferscale_operator.activator.permission import MayWake, any_token, everybody, one_key
from inferscale_operator.activator.scale import Scale, ServiceProbe
from inferscale_operator.activator.servers import Servers
from inferscale_operator.cluster.transport import Transport, load_configuration
from inferscale_operator.logs import set_up_logging

COMMAND = "activator"
EXIT_STOPPED = 0
EXIT_USAGE = 2
SCALE_TIMEOUT_SECONDS = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActivatorSettings:
    """What an activator is told.

    Attributes:
        name: Of the PersonalizedModel; also the name under which it is served.
        namespace: Of the PersonalizedModel.
        target: URL of the Service that selects its servers.
        host: Address to listen on.
        port: Port to listen on.
        wake_replicas: Size to wake the model in.
        max_held_requests: Most requests that wait for a server.
        max_wait_seconds: Longest wait of a request.
        drain_seconds: How long requests may end when the process is stopped.
        kubeconfig: Kubeconfig file; None takes the pod's service account.
        log_level: Least level that is logged.
        log_format: ``json`` or ``text``.
        api_key_file: File with the key that requests need to wake the model.
        require_token: Whether they need any bearer token, which only servers check.
    """

    name: str
    namespace: str
    target: str
    host: str
    port: int
    wake_replicas: int
    max_held_requests: int
    max_wait_seconds: float
    drain_seconds: float
    kubeconfig: str | None
    log_level: str
    log_format: str
    api_key_file: Path | None
    require_token: bool


def read_activator_settings(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> ActivatorSettings:
    """The settings of a command line.

    Args:
        arguments: Words after ``activator``.
        environment: ``INFERSCALE_KUBECONFIG`` and ``INFERSCALE_TARGET``.

    Raises:
        SystemExit: ``--help``, or a wrong flag.
    """
    given = vars(_parser().parse_args(arguments))
    service = f"http://{given['name']}-servers.{given['namespace']}.svc:80"
    return ActivatorSettings(
        **{
            **given,
            "target": (given["target"] or environment.get("INFERSCALE_TARGET") or service).rstrip(
                "/"
            ),
            "kubeconfig": given["kubeconfig"] or environment.get("INFERSCALE_KUBECONFIG") or None,
        }
    )


def run(arguments: Sequence[str]) -> int:
    """Runs an activator until a signal; the process's exit code."""
    settings = read_activator_settings(arguments, os.environ)
    set_up_logging(settings.log_level, settings.log_format)
    return asyncio.run(serve(settings))


async def serve(settings: ActivatorSettings) -> int:
    """Serves until SIGTERM or SIGINT, then lets requests end.

    Returns:
        The exit code.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
    async with contextlib.AsyncExitStack() as stack:
        try:
            configuration = await load_configuration(settings.kubeconfig, None)
        except ValueError as error:
            print(f"inferscale-operator {COMMAND}: {error}", file=sys.stderr)
            return EXIT_USAGE
        transport = Transport(
            configuration, timeout_seconds=SCALE_TIMEOUT_SECONDS, max_connections=2
        )
        stack.push_async_callback(transport.close)
        probing = await stack.enter_async_context(new_session())
        scale = Scale(transport, settings.namespace, settings.name, settings.wake_replicas)
        metrics = ActivatorMetrics(CollectorRegistry())
        servers = Servers(ServiceProbe(probing, settings.target).find, scale.wake, metrics)
        activator = Activator(
            settings.name,
            servers,
            Admission(settings.max_held_requests),
            metrics,
            settings.max_wait_seconds,
            _may_wake(settings),
        )
        try:
            runner = await listen(activator, settings.host, settings.port, settings.drain_seconds)
        except OSError as error:
            _log.error("cannot listen on %s:%d: %s", settings.host, settings.port, error)
            return EXIT_USAGE
        _log.info("activator of %s/%s is up", settings.namespace, settings.name)
        await stop.wait()
        _log.info("stopping: requests under way may end")
        activator.draining = True
        await runner.cleanup()
    return EXIT_STOPPED


def _may_wake(settings: ActivatorSettings) -> MayWake:
    file = settings.api_key_file
    if file is not None:
        return one_key(lambda: file.read_text(encoding="utf-8") if file.is_file() else None)
    return any_token if settings.require_token else everybody


async def listen(activator: Activator, host: str, port: int, drain_seconds: float) -> web.AppRunner:
    """Starts to answer; ``cleanup`` of the result ends it in order.

    Raises:
        OSError: The address cannot be used.
    """
    runner = web.AppRunner(
        activator.application(),
        access_log=None,
        # A client that goes away gives its place to the next.
        handler_cancellation=True,
        shutdown_timeout=drain_seconds,
    )
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"inferscale-operator {COMMAND}",
        description="Holds requests for a model that is scaled to zero, wakes it and forwards "
        "them.",
        epilog="Exit codes: 0 stopped by a signal; 2 wrong settings.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--name", required=True, help="name of the PersonalizedModel")
    add("--namespace", required=True, help="its namespace")
    add(
        "--target",
        metavar="URL",
        help="where its servers are [INFERSCALE_TARGET]. Default: its Service NAME-servers",
    )
    add("--host", default="0.0.0.0", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on")
    add("--wake-replicas", type=int, default=1, metavar="N", help="size to wake it in")
    add("--max-held-requests", type=int, default=100, metavar="N", help="most that wait")
    add("--max-wait-seconds", type=float, default=600.0, metavar="S", help="longest wait")
    add("--drain-seconds", type=float, default=60.0, metavar="S", help="time to end requests")
    add("--api-key-file", type=Path, metavar="FILE", help="key that requests need to wake it")
    add("--require-token", action="store_true", help="wake it only for some bearer token")
    add("--kubeconfig", metavar="FILE", help="instead of the pod's account [INFERSCALE_KUBECONFIG]")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--log-format", choices=("json", "text"), default="json")
    return parser
