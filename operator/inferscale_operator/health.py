"""The port for probes and Prometheus: ``/healthz``, ``/readyz``, ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from inferscale_operator.metrics import OperatorMetrics

Check = Callable[[], str | None]
"""Why something is not well, or None."""


@dataclass(slots=True)
class Health:
    """What the probes answer from.

    Attributes:
        live: Checks whose failure asks for a restart.
        not_ready: Why the operator is not ready, empty when it is.
        state: What it does, for people: ``standby`` or ``acting``.
        before_metrics: Called before metrics are read.
    """

    live: list[Check] = field(default_factory=list)
    not_ready: str = "starting"
    state: str = "starting"
    before_metrics: list[Callable[[], None]] = field(default_factory=list)

    def problems(self) -> list[str]:
        """What is wrong with this process."""
        return [problem for check in self.live if (problem := check()) is not None]


def build_application(health: Health, metrics: OperatorMetrics) -> web.Application:
    """The HTTP application."""

    async def healthz(_: web.Request) -> web.Response:
        problems = health.problems()
        if problems:
            return web.Response(status=503, text="\n".join(problems) + "\n")
        return web.Response(text=f"ok: {health.state}\n")

    async def readyz(_: web.Request) -> web.Response:
        if health.not_ready:
            return web.Response(status=503, text=f"{health.not_ready}\n")
        return web.Response(text=f"ok: {health.state}\n")

    async def read_metrics(_: web.Request) -> web.Response:
        for prepare in health.before_metrics:
            prepare()
        return web.Response(
            body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    application = web.Application()
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/readyz", readyz)
    application.router.add_get("/metrics", read_metrics)
    return application


async def serve(application: web.Application, host: str, port: int) -> web.AppRunner:
    """Starts to answer.

    Raises:
        OSError: The address cannot be used.
    """
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
