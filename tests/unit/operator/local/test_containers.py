from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from inferscale_operator.local.containers import Backoff, Container, Timekeeping
from inferscale_operator.local.environment import MissingError
from inferscale_operator.local.processes import StartError

pytestmark = pytest.mark.asyncio


class Time:
    """A clock that jumps to the end of the shortest sleep when nothing else can run."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self._sleepers: list[tuple[datetime, asyncio.Future[None]]] = []
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + timedelta(seconds=seconds), future))
        await future

    def keeping(self) -> Timekeeping:
        return Timekeeping(lambda: self.now, self.sleep)

    async def run_until(self, condition: Callable[[], object]) -> None:
        for _ in range(1000):
            for _ in range(200):
                await asyncio.sleep(0)
            if condition():
                return
            self._sleepers = [item for item in self._sleepers if not item[1].done()]
            assert self._sleepers, "nothing is waiting, and the condition does not hold"
            moment, future = min(self._sleepers, key=lambda item: item[0])
            self.now = max(self.now, moment)
            future.set_result(None)
        raise AssertionError("the condition was not met")


class FakeProcess:
    pid = 7

    def __init__(self, code: int | None = None, stubborn: bool = False) -> None:
        self.log: list[str] = []
        self.healthy: dict[str, bool] = {}
        self.hook_ends = asyncio.Event()
        self._stubborn = stubborn
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if code is not None:
            self.end(code)

    def end(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        self.log.append("TERM")
        if not self._stubborn:
            self.end(143)

    def kill(self) -> None:
        if not self._code.done():
            self.log.append("KILL")
        self.end(137)

    def message(self, code: int) -> str:
        return f"ended with {code}"

    async def probe(self, probe: Mapping[str, Any]) -> bool:
        return self.healthy.get(probe["name"], False)

    async def hook(self, handler: Mapping[str, Any]) -> None:
        self.log.append("hook")
        await self.hook_ends.wait()
        self.log.append("hook ended")


Make = Callable[[], FakeProcess]


class Run:
    """A container whose starts come from a list of processes or errors."""

    def __init__(self, *starts: Make | Exception, policy: str = "Always", **spec: Any) -> None:
        self.time = Time()
        self.processes: list[FakeProcess] = []
        self._starts = list(starts)
        self.container = Container(
            {"name": "main", **spec},
            policy,
            self._launch,
            lambda: None,
            Backoff(),
            self.time.keeping(),
        )
        self.task = asyncio.ensure_future(self.container.run())

    async def _launch(self) -> FakeProcess:
        start = self._starts.pop(0) if len(self._starts) > 1 else self._starts[0]
        if isinstance(start, Exception):
            raise start
        self.processes.append(start())
        return self.processes[-1]

    @property
    def state(self) -> dict[str, Any]:
        return self.container.state.state

    async def until(self, condition: Callable[[], object]) -> None:
        await self.time.run_until(condition)


def ends_with(code: int) -> Make:
    return lambda: FakeProcess(code)


@pytest.mark.parametrize(
    ("policy", "code", "restarts"),
    [
        ("Never", 0, False),
        ("Never", 1, False),
        ("OnFailure", 0, False),
        ("OnFailure", 1, True),
        ("Always", 0, True),
    ],
)
async def test_restart_policy(policy: str, code: int, restarts: bool) -> None:
    run = Run(ends_with(code), FakeProcess, policy=policy)
    await run.until(lambda: run.task.done() or len(run.processes) == 2)
    assert run.container.state.restarts == int(restarts)
    if not restarts:
        ended = run.state["terminated"]
        assert ended["exitCode"] == code
        assert ended["reason"] == ("Error" if code else "Completed")
        assert ended["message"] == f"ended with {code}"
    else:
        assert run.container.state.last_state["terminated"]["exitCode"] == code
    run.container.kill()
    await run.until(run.task.done)


async def test_crashes_are_backed_off_up_to_five_minutes() -> None:
    run = Run(ends_with(1))
    await run.until(lambda: run.container.state.restarts == 8)
    assert run.time.slept[:7] == [10, 20, 40, 80, 160, 300, 300]
    await run.until(lambda: "waiting" in run.state)
    assert run.state["waiting"]["reason"] == "CrashLoopBackOff"
    assert "300s" in run.state["waiting"]["message"]
    assert run.container.state.last_state["terminated"]["exitCode"] == 1
    run.container.stop(1)
    await run.until(run.task.done)
    assert run.state["terminated"]["exitCode"] == 1, "stopped while waiting: the last end counts"


async def test_a_long_run_forgets_earlier_crashes() -> None:
    run = Run(ends_with(1), ends_with(1), FakeProcess, FakeProcess)
    await run.until(lambda: len(run.processes) == 3)
    run.time.now += timedelta(seconds=601)
    run.processes[-1].end(1)
    await run.until(lambda: len(run.processes) == 4)
    assert run.time.slept == [10]
    run.container.kill()
    await run.until(run.task.done)


async def test_what_is_missing_is_waited_for() -> None:
    run = Run(MissingError('secret "s" not found'), FakeProcess)
    await run.until(lambda: "waiting" in run.state and "message" in run.state["waiting"])
    assert run.state["waiting"] == {
        "reason": "CreateContainerConfigError",
        "message": 'secret "s" not found',
    }
    await run.until(lambda: "running" in run.state)
    assert run.container.state.restarts == 0
    run.container.kill()
    await run.until(run.task.done)


async def test_a_program_that_is_not_there() -> None:
    run = Run(StartError("no such program"), policy="Never")
    await run.until(run.task.done)
    ended = run.state["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("StartError", 128)
    assert ended["message"] == "no such program"


async def test_without_probes_a_running_container_is_ready() -> None:
    run = Run(FakeProcess, policy="Never")
    await run.until(lambda: run.container.state.ready)
    assert run.container.state.started
    run.processes[0].end(1)
    await run.until(run.task.done)
    assert not run.container.state.ready


async def test_readiness_waits_for_startup_and_follows_its_probe() -> None:
    run = Run(
        FakeProcess,
        startupProbe={"name": "startup", "periodSeconds": 5, "failureThreshold": 100},
        readinessProbe={"name": "ready", "periodSeconds": 3, "failureThreshold": 2},
    )
    await run.until(lambda: run.processes)
    process = run.processes[0]
    process.healthy["ready"] = True
    await run.until(lambda: len(run.time.slept) > 3)
    assert not run.container.state.started
    assert not run.container.state.ready
    process.healthy["startup"] = True
    await run.until(lambda: run.container.state.ready)
    assert run.container.state.started
    process.healthy["ready"] = False
    await run.until(lambda: not run.container.state.ready)
    assert "running" in run.state, "an unready container is not restarted"
    run.container.kill()
    await run.until(run.task.done)


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe"])
async def test_a_container_that_fails_its_probe_is_restarted(probe: str) -> None:
    run = Run(FakeProcess, **{probe: {"name": "x", "periodSeconds": 5, "failureThreshold": 3}})
    await run.until(lambda: run.container.state.restarts == 1)
    assert run.processes[0].log == ["TERM"]
    assert run.time.slept.count(5.0) >= 2, "three failures in a row were needed"
    run.container.kill()
    await run.until(run.task.done)


async def test_stop_runs_the_hook_before_sigterm() -> None:
    run = Run(FakeProcess, lifecycle={"preStop": {"sleep": {"seconds": 10}}})
    await run.until(lambda: "running" in run.state)
    process = run.processes[0]
    run.container.stop(60)
    await run.until(lambda: process.log == ["hook"])
    process.hook_ends.set()
    await run.until(run.task.done)
    assert process.log == ["hook", "hook ended", "TERM"]
    assert run.state["terminated"]["exitCode"] == 143


async def test_stop_without_the_hook() -> None:
    run = Run(FakeProcess, lifecycle={"preStop": {"sleep": {"seconds": 10}}})
    await run.until(lambda: "running" in run.state)
    run.container.stop(60, with_pre_stop=False)
    await run.until(run.task.done)
    assert run.processes[0].log == ["TERM"]
    assert run.container.state.restarts == 0


async def test_a_container_that_does_not_end_is_killed_after_the_grace_period() -> None:
    run = Run(lambda: FakeProcess(stubborn=True))
    await run.until(lambda: "running" in run.state)
    begin = run.time.now
    run.container.stop(25)
    await run.until(run.task.done)
    assert run.processes[0].log == ["TERM", "KILL"]
    assert (run.time.now - begin).total_seconds() == 25
    assert run.state["terminated"]["exitCode"] == 137


async def test_a_hook_that_hangs_leaves_two_seconds_for_sigterm() -> None:
    run = Run(
        lambda: FakeProcess(stubborn=True), lifecycle={"preStop": {"exec": {"command": ["x"]}}}
    )
    await run.until(lambda: "running" in run.state)
    begin = run.time.now
    run.container.stop(25)
    await run.until(run.task.done)
    assert (run.time.now - begin).total_seconds() == 27
    assert run.processes[0].log == ["hook", "TERM", "KILL"]
