"""One container of a Pod: start, probes, restart with backoff, end.

What runs behind it is reached through ``Launch``, so that the behaviour can be tested without
processes; time goes through ``clock`` and ``sleep``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.local.environment import MissingError
from inferscale_operator.local.probes import Threshold, Timing
from inferscale_operator.local.processes import StartError

MAX_MESSAGE_BYTES = 4096
"""Longest termination message, as in a kubelet."""

LEAST_GRACE_SECONDS = 2.0
"""What is left for SIGTERM after a preStop handler that took the whole grace period."""

CONFIG_RETRY_SECONDS = 2.0
"""How often a container whose references are missing is tried again."""


class Running(Protocol):
    """A started container."""

    pid: int

    async def wait(self) -> int:
        """The exit status."""

    def terminate(self) -> None:
        """Asks it to end."""

    def kill(self) -> None:
        """Ends it and everything that it has started."""

    def message(self, code: int) -> str:
        """The termination message."""

    async def probe(self, probe: Mapping[str, Any]) -> bool:
        """Carries out one probe."""

    async def hook(self, handler: Mapping[str, Any]) -> None:
        """Carries out a lifecycle handler."""


Launch = Callable[[], Awaitable[Running]]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waiting times before restarts, as in a kubelet: none, then 10 s, doubled up to 5 min."""

    first: float = 10.0
    longest: float = 300.0
    reset_after: float = 600.0
    """A container that ran this long starts from the beginning."""

    def delay(self, restarts: int) -> float:
        """Seconds before the next start, after this many in a row."""
        # The exponent is bounded because a float would overflow after weeks of crashing.
        return 0.0 if restarts == 0 else min(self.first * 2 ** min(restarts - 1, 16), self.longest)


@dataclass(frozen=True, slots=True)
class Timekeeping:
    """Clock and sleep; both are replaced in tests."""

    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


def timestamp(moment: datetime) -> str:
    """RFC 3339, in seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True)
class ContainerState:
    """What ``containerStatuses`` says about a container."""

    state: Manifest = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Manifest = field(default_factory=dict)
    ready: bool = False
    started: bool = False
    restarts: int = 0
    pid: int = 0


class Container:
    """Runs one container until its restart policy or ``stop`` ends it.

    Args:
        spec: The container of the manifest.
        restart_policy: ``Always``, ``OnFailure`` or ``Never``.
        launch: Starts it.
        on_change: Called after every change of ``state``.
        backoff: Waiting times.
        time: Clock and sleep.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        restart_policy: str,
        launch: Launch,
        on_change: Callable[[], None],
        backoff: Backoff | None = None,
        time: Timekeeping | None = None,
    ) -> None:
        self.spec = spec
        self.state = ContainerState()
        self._policy = restart_policy
        self._launch = launch
        self._on_change = on_change
        self._backoff = backoff or Backoff()
        self._time = time or Timekeeping()
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._grace = 30.0
        self._with_pre_stop = True

    def stop(self, grace: float, *, with_pre_stop: bool = True) -> None:
        """Asks the container to end: preStop, SIGTERM, and SIGKILL after ``grace`` seconds."""
        self._grace = grace
        self._with_pre_stop = with_pre_stop
        self._stop.set()

    def kill(self) -> None:
        """Ends the container at once."""
        self._kill.set()
        self._stop.set()

    async def run(self) -> None:
        """Runs until the container is not to be started again."""
        restarts_in_row = 0
        while not self._stop.is_set():
            begin = self._time.clock()
            code = await self._run_once(begin)
            if code is None:
                await self._pause(CONFIG_RETRY_SECONDS)
                continue
            if self._stop.is_set() or not self._restarts(code):
                break
            lifetime = (self._time.clock() - begin).total_seconds()
            if lifetime >= self._backoff.reset_after:
                restarts_in_row = 0
            await self._back_off(self._backoff.delay(restarts_in_row))
            restarts_in_row += 1
            if not self._stop.is_set():
                self.state.restarts += 1
        if "terminated" not in self.state.state:
            self._end(begin=None, code=137, message="stopped before it was started")

    def _restarts(self, code: int) -> bool:
        return self._policy == "Always" or (self._policy == "OnFailure" and code != 0)

    async def _run_once(self, begin: datetime) -> int | None:
        """Starts and watches it; None when it could not be set up."""
        try:
            process = await self._launch()
        except MissingError as error:
            self._wait_because("CreateContainerConfigError", str(error))
            return None
        except StartError as error:
            self._end(begin, 128, str(error), "StartError")
            return 128
        if self.state.state.get("terminated"):
            self.state.last_state = self.state.state
        self.state.state = {"running": {"startedAt": timestamp(begin)}}
        self.state.pid = process.pid
        self._on_change()
        try:
            code = await self._watch(process)
        except asyncio.CancelledError:
            process.kill()
            raise
        self._end(begin, code, process.message(code))
        return code

    async def _watch(self, process: Running) -> int:
        ended = asyncio.ensure_future(process.wait())
        unhealthy = asyncio.ensure_future(self._probe_all(process))
        asked = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({ended, unhealthy, asked}, return_when=asyncio.FIRST_COMPLETED)
            unhealthy.cancel()
            if not ended.done():
                grace = self._grace if asked.done() else self._probe_grace()
                await self._terminate(process, ended, grace)
            return await ended
        finally:
            for task in (unhealthy, asked, ended):
                task.cancel()
            await asyncio.gather(unhealthy, asked, return_exceptions=True)

    def _probe_grace(self) -> float:
        probes = (self.spec.get("livenessProbe") or {}, self.spec.get("startupProbe") or {})
        given = [
            item["terminationGracePeriodSeconds"]
            for item in probes
            if len(item) and "terminationGracePeriodSeconds" in item
        ]
        return float(given[0]) if given else self._grace

    async def _terminate(self, process: Running, ended: asyncio.Future[int], grace: float) -> None:
        """PreStop, SIGTERM, SIGKILL; the grace period counts from the beginning of preStop."""
        overdue = asyncio.ensure_future(self._time.sleep(grace))
        killed = asyncio.ensure_future(self._kill.wait())
        steps: set[asyncio.Future[Any]] = {ended, overdue, killed}
        handler = (self.spec.get("lifecycle") or {}).get("preStop")
        hooked = bool(handler) and self._with_pre_stop
        hook = asyncio.ensure_future(process.hook(handler or {}) if hooked else asyncio.sleep(0))
        try:
            if hooked:
                await asyncio.wait({hook, *steps}, return_when=asyncio.FIRST_COMPLETED)
                if overdue.done():
                    overdue = asyncio.ensure_future(self._time.sleep(LEAST_GRACE_SECONDS))
                    steps = {ended, overdue, killed}
            process.terminate()
            await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            process.kill()
        finally:
            for task in (overdue, killed, hook):
                task.cancel()
            await asyncio.gather(overdue, killed, hook, return_exceptions=True)

    async def _probe_all(self, process: Running) -> None:
        """Keeps ``started`` and ``ready``; returns when the container has to be restarted."""
        startup = self.spec.get("startupProbe")
        if startup and not await self._first_verdict(process, startup):
            return
        self.state.started = True
        self.state.ready = not self.spec.get("readinessProbe")
        self._on_change()
        async with asyncio.TaskGroup() as group:
            readiness = group.create_task(self._keep_ready(process))
            await self._until_dead(process)
            readiness.cancel()

    async def _first_verdict(self, process: Running, probe: Mapping[str, Any]) -> bool:
        timing = Timing.of(probe)
        threshold = Threshold(timing)
        await self._time.sleep(timing.initial_delay)
        while True:
            verdict = threshold.observe(await process.probe(probe))
            if verdict is not None:
                return verdict
            await self._time.sleep(timing.period)

    async def _keep_ready(self, process: Running) -> None:
        probe = self.spec.get("readinessProbe")
        if not probe:
            return
        timing = Timing.of(probe)
        threshold = Threshold(timing)
        await self._time.sleep(timing.initial_delay)
        while True:
            verdict = threshold.observe(await process.probe(probe))
            if verdict is not None and verdict != self.state.ready:
                self.state.ready = verdict
                self._on_change()
            # A kubelet, too, looks more often than asked until a container is ready for once.
            await self._time.sleep(timing.period if self.state.ready else min(timing.period, 1.0))

    async def _until_dead(self, process: Running) -> None:
        probe = self.spec.get("livenessProbe")
        if not probe:
            await asyncio.Event().wait()
            return
        timing = Timing.of(probe)
        threshold = Threshold(timing)
        await self._time.sleep(timing.initial_delay)
        while threshold.observe(await process.probe(probe)) is not False:
            await self._time.sleep(timing.period)

    async def _pause(self, seconds: float) -> None:
        waits = [
            asyncio.ensure_future(self._time.sleep(seconds)),
            asyncio.ensure_future(self._stop.wait()),
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _back_off(self, seconds: float) -> None:
        if not seconds:
            return
        terminated = self.state.state
        name = self.spec["name"]
        self.state.last_state = terminated
        self._wait_because(
            "CrashLoopBackOff", f"back-off {seconds:g}s restarting failed container={name}"
        )
        await self._pause(seconds)
        if self._stop.is_set():
            self.state.state = terminated

    def _wait_because(self, reason: str, message: str) -> None:
        self.state.state = {"waiting": {"reason": reason, "message": message}}
        self._on_change()

    def _end(
        self, begin: datetime | None, code: int, message: str, reason: str | None = None
    ) -> None:
        now = self._time.clock()
        if "terminated" in self.state.state:
            self.state.last_state = self.state.state
        ended: Manifest = {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "startedAt": timestamp(begin or now),
            "finishedAt": timestamp(now),
        }
        if message:
            ended["message"] = message[-MAX_MESSAGE_BYTES:]
        self.state.state = {"terminated": ended}
        self.state.ready = self.state.started = False
        self._on_change()
