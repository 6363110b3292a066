"""``inferscale-operator``: settings, logging, signals, the lease, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from typing import Any

from kubernetes.aio.client.configuration import Configuration
from prometheus_client import CollectorRegistry, disable_created_metrics

from inferscale_operator import crds_command
from inferscale_operator.acting import Acting
from inferscale_operator.activator import command as activator_command
from inferscale_operator.cluster.client import ApiCluster
from inferscale_operator.cluster.errors import ClusterError
from inferscale_operator.cluster.lease import Lease, LeaseLostError, LeaseSettings
from inferscale_operator.cluster.recorder import EventRecorder
from inferscale_operator.cluster.transport import Transport, load_configuration
from inferscale_operator.desired.kinds import MEMORY_STORE, PERSONALIZED_MODEL
from inferscale_operator.handlers.reconciler import PlanFunction
from inferscale_operator.health import Health, build_application, serve
from inferscale_operator.logs import set_up_logging
from inferscale_operator.metrics import OperatorMetrics
from inferscale_operator.planner import memorystore, personalizedmodel
from inferscale_operator.settings import VERSION, Settings, read_settings

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

PLANS: Mapping[str, PlanFunction] = {
    MEMORY_STORE.kind: memorystore.plan,
    PERSONALIZED_MODEL.kind: personalizedmodel.plan,
}
_LAST_EVENTS_SECONDS = 2.0
_log = logging.getLogger("inferscale_operator.main")


def main() -> int:
    """Runs the operator, ``activator`` or ``crds``; the process's exit code."""
    if sys.argv[1:2] == [crds_command.COMMAND]:
        return crds_command.run(sys.argv[2:])
    if sys.argv[1:2] == [activator_command.COMMAND]:
        return activator_command.run(sys.argv[2:])
    try:
        settings = read_settings(sys.argv[1:], os.environ)
    except ValueError as error:
        print(f"inferscale-operator: {error}", file=sys.stderr)
        return EXIT_USAGE
    set_up_logging(settings.log_level, settings.log_format)
    return asyncio.run(run(settings, PLANS))


async def run(settings: Settings, plans: Mapping[str, PlanFunction]) -> int:
    """Runs the operator until a signal.

    Args:
        settings: What to do.
        plans: The decision for each kind, by its name.

    Returns:
        The exit code.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
    metrics, health = OperatorMetrics(CollectorRegistry()), Health()
    try:
        configuration = await load_configuration(settings.kubeconfig, settings.context)
        runner = await serve(
            build_application(health, metrics), settings.http_host, settings.http_port
        )
    except (ValueError, OSError) as error:
        _log.error("cannot start: %s", error)
        return EXIT_USAGE
    _log.info(
        "inferscale-operator %s as %s, probes on %s",
        VERSION,
        settings.identity,
        ", ".join(f"{host}:{port}" for host, port, *_ in runner.addresses),
    )
    try:
        return await _hold_lease_and_act(settings, configuration, plans, metrics, health, stop)
    finally:
        await runner.cleanup()


async def _hold_lease_and_act(
    settings: Settings,
    configuration: Configuration,
    plans: Mapping[str, PlanFunction],
    metrics: OperatorMetrics,
    health: Health,
    stop: asyncio.Event,
) -> int:
    # The lease has connections of its own: it must not wait behind a busy pool.
    lease_transport = Transport(
        configuration,
        timeout_seconds=settings.lease_seconds / 3,
        on_request=metrics.requested,
        max_connections=2,
    )
    lease = Lease(
        lease_transport,
        LeaseSettings(
            settings.lease_place, settings.lease_name, settings.identity, settings.lease_seconds
        ),
    )
    health.state, health.not_ready = "standby", ""
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(lease_transport.close)
        if not await _until(stop, lease.acquire()):
            return EXIT_STOPPED
        _log.info("acting: lease %s/%s is held", settings.lease_place, settings.lease_name)
        metrics.leads(True)
        health.state, health.not_ready = "acting", "starting"
        keeping = asyncio.create_task(_exit_when_lost(lease))
        try:
            code = await _act(settings, configuration, plans, metrics, health, stop, lease)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await lease.release()
        return code


async def _act(
    settings: Settings,
    configuration: Configuration,
    plans: Mapping[str, PlanFunction],
    metrics: OperatorMetrics,
    health: Health,
    stop: asyncio.Event,
    lease: Lease,
) -> int:
    transport = Transport(
        configuration,
        timeout_seconds=settings.request_timeout_seconds,
        on_request=metrics.requested,
        may_write=lease.check,
        max_connections=settings.workers * 4,
    )
    recorder = EventRecorder(transport, settings.identity)
    cluster = ApiCluster(transport, recorder)
    posting = asyncio.create_task(recorder.run())
    try:
        acting = Acting(settings, configuration, cluster, plans, metrics, health)
        ended = await _until(stop, acting.run())
        return EXIT_FAILED if ended else EXIT_STOPPED
    except LeaseLostError as error:
        _lost(error)
        return EXIT_FAILED
    except ClusterError as error:
        _log.error("cannot go on: %s", error)
        return EXIT_FAILED
    finally:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(recorder.drain(), _LAST_EVENTS_SECONDS)
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)
        await cluster.close()
        await transport.close()


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Runs something until it ends (True) or until the stop (False, it is cancelled)."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        task.result()
        return True
    _log.info("stopping")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


async def _exit_when_lost(lease: Lease) -> None:
    try:
        await lease.keep()
    except LeaseLostError as error:
        _lost(error)


def _lost(error: LeaseLostError) -> None:
    """Ends the process at once: another operator may act already."""
    _log.critical("%s; the process ends", error)
    logging.shutdown()
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
