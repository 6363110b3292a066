"""The executor with real, small processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from inferscale_operator.desired.kinds import CONFIG_MAP, POD
from inferscale_operator.desired.paths import PORTS_ANNOTATION
from inferscale_operator.local.containers import Backoff
from inferscale_operator.local.executor import EXECUTOR, Executor
from inferscale_operator.local.launch import Launcher
from inferscale_operator.local.memory_cluster import MemoryCluster
from inferscale_operator.local.pod_status import is_ready
from inferscale_operator.local.volumes import VolumeFolders

pytestmark = pytest.mark.asyncio

TIMEOUT = 30.0
Probe = Callable[[], Awaitable[Any]]


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", code, *arguments]


class Machine:
    """An executor over a cluster in memory, driven by hand."""

    def __init__(self, folder: Path, cluster: MemoryCluster | None = None) -> None:
        self.cluster = cluster or MemoryCluster()
        self.folders = VolumeFolders(folder / "data", folder / "memory")
        self.lines: list[tuple[str, str]] = []
        self.launcher = Launcher(
            self.cluster.get,
            self.folders,
            lambda name, line: self.lines.append((name, line)),
            follow_seconds=0.02,
        )
        self.executor = Executor(self.cluster, self.launcher, backoff=Backoff(first=0.05))

    async def run(self, name: str = "p", **body: Any) -> dict[str, Any]:
        container = {"name": "main", "image": "i", **body.pop("container", {})}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "ns"},
            "spec": {"restartPolicy": "Never", "containers": [container], **body},
        }
        return await self.cluster.create(pod)

    async def pod(self, name: str = "p") -> dict[str, Any]:
        found = await self.cluster.get(POD, "ns", name)
        assert found is not None
        return found

    async def until(self, condition: Probe) -> Any:
        async with asyncio.timeout(TIMEOUT):
            while True:
                await self.executor.sync()
                if found := await condition():
                    return found
                await asyncio.sleep(0.01)

    async def phase(self, phase: str, name: str = "p") -> dict[str, Any]:
        async def reached() -> dict[str, Any] | None:
            pod = await self.pod(name)
            return pod if (pod.get("status") or {}).get("phase") == phase else None

        found: dict[str, Any] = await self.until(reached)
        return found

    async def printed(self, line: str) -> None:
        async def seen() -> bool:
            return any(text == line for _, text in self.lines)

        await self.until(seen)

    async def delete(self, name: str = "p") -> None:
        await self.cluster.delete(POD, "ns", name, (await self.pod(name))["metadata"]["uid"])

    async def gone(self, name: str = "p") -> None:
        async def is_gone() -> bool:
            return await self.cluster.get(POD, "ns", name) is None

        await self.until(is_gone)


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = pod["status"]["containerStatuses"][0]
    return found


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest_asyncio.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.executor.kill()
    await machine.executor.stop()


async def test_a_pod_that_succeeds(machine: Machine) -> None:
    await machine.run(container={"command": python("print('hello')")})
    pod = await machine.phase("Succeeded")
    ended = container_of(pod)["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (0, "Completed")
    assert machine.lines == [("p", "hello")]
    log = machine.launcher.log_of(pod, "main")
    assert log.read_text() == "hello\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 15)", 143)],
)
async def test_exit_codes(machine: Machine, code: str, expected: int) -> None:
    await machine.run(container={"command": python(code)})
    pod = await machine.phase("Failed")
    assert container_of(pod)["state"]["terminated"]["exitCode"] == expected


async def test_an_unknown_program(machine: Machine) -> None:
    await machine.run(container={"command": ["no-such-program"]})
    ended = container_of(await machine.phase("Failed"))["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert "no-such-program" in ended["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"container": {"args": ["x"]}}, "names no command"),
        ({"container": {"command": ["true"]}, "initContainers": [{"name": "i"}]}, "init"),
        (
            {"container": {"command": ["true"], "readinessProbe": {"grpc": {"port": 1}}}},
            "readinessProbe",
        ),
    ],
)
async def test_what_is_not_done_here_is_said(
    machine: Machine, body: dict[str, Any], message: str
) -> None:
    await machine.run(**body)
    ended = container_of(await machine.phase("Failed"))["state"]["terminated"]
    assert ended["reason"] == "StartError"
    assert message in ended["message"]


async def test_the_termination_message_is_what_the_container_wrote(machine: Machine) -> None:
    code = "import sys; open(sys.argv[1], 'w').write('report'); print('log'); sys.exit(1)"
    await machine.run(
        container={
            "command": python(code, "/dev/termination-log"),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    )
    assert container_of(await machine.phase("Failed"))["state"]["terminated"]["message"] == "report"


@pytest.mark.parametrize(("code", "message"), [(1, "79\nlast"), (0, None)])
async def test_a_failed_container_without_a_message_shows_its_log(
    machine: Machine, code: int, message: str | None
) -> None:
    program = f"import sys; [print(i) for i in range(80)]; print('last'); sys.exit({code})"
    await machine.run(
        container={
            "command": python(program),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    )
    pod = await machine.phase("Failed" if code else "Succeeded")
    found = container_of(pod)["state"]["terminated"].get("message")
    if message is None:
        assert found is None
    else:
        assert found.endswith(message)
        assert found.startswith("1\n"), "80 lines at most"


async def test_restart_until_it_succeeds(machine: Machine) -> None:
    code = "import os, sys; p = sys.argv[1]; n = os.path.exists(p); open(p, 'w'); sys.exit(not n)"
    await machine.run(
        restartPolicy="OnFailure",
        volumes=[{"name": "v", "emptyDir": {}}],
        container={
            "command": python(code, "/v/seen"),
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        },
    )
    status = container_of(await machine.phase("Succeeded"))
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] == 1


async def test_arguments_environment_and_files(machine: Machine) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "c", "namespace": "ns"},
        "data": {"config.json": '{"store": "/v/x"}'},
    }
    await machine.cluster.create(config)
    code = "import os, sys; print(open(sys.argv[1]).read(), os.environ['HERE'], *sys.argv[2:])"
    await machine.run(
        volumes=[
            {"name": "v", "emptyDir": {"medium": "Memory"}},
            {"name": "c", "configMap": {"name": "c"}},
        ],
        container={
            "command": python(code),
            "args": ["/etc/c/config.json", "--at=$(HERE)", "$$(HERE)", "0.0.0.0"],
            "env": [{"name": "HERE", "value": "/v/here"}],
            "volumeMounts": [
                {"name": "v", "mountPath": "/v"},
                {"name": "c", "mountPath": "/etc/c"},
            ],
        },
    )
    pod = await machine.phase("Succeeded")
    folder = next(machine.folders.memory.glob("*/v"))
    expected = f'{{"store": "{folder}/x"}} {folder}/here --at={folder}/here $(HERE) 127.0.0.1'
    assert machine.lines == [("p", expected)]
    await machine.delete()
    await machine.gone()
    assert not folder.exists()
    assert not machine.folders.pod(pod).exists()


async def test_a_pod_waits_for_what_its_manifest_names(machine: Machine) -> None:
    source = [{"configMapRef": {"name": "late"}}]
    await machine.run(container={"command": python(""), "envFrom": source})

    async def waits() -> bool:
        pod = await machine.pod()
        statuses = (pod.get("status") or {}).get("containerStatuses") or [{"state": {}}]
        waiting = statuses[0]["state"].get("waiting", {})
        return bool(waiting.get("message") == 'configmap "late" not found')

    await machine.until(waits)
    assert (await machine.pod())["status"]["phase"] == "Pending"


SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if os.path.exists("healthy") else 503)
        self.end_headers()
    def log_message(self, *_):
        pass
print(os.getcwd(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(os.environ["INFERSCALE_PORT"])), Handler).serve_forever()
"""


async def test_http_probes_and_ports(machine: Machine) -> None:
    await machine.run(
        restartPolicy="Always",
        container={
            "command": [sys.executable, "-c", SERVER],
            "ports": [{"name": "http", "containerPort": 8000}],
            "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        },
    )
    pod = await machine.phase("Running")
    port = json.loads(pod["metadata"]["annotations"][PORTS_ANNOTATION])["http"]

    async def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    await machine.until(answers)
    assert not is_ready(await machine.pod())
    await machine.until(lambda: asyncio.sleep(0, result=machine.lines))
    Path(machine.lines[0][1], "healthy").touch()

    async def ready() -> bool:
        return is_ready(await machine.pod())

    await machine.until(ready)
    status = (await machine.pod())["status"]
    assert status["podIP"] == "127.0.0.1"
    assert {item["type"] for item in status["conditions"]} >= {"Ready", "ContainersReady"}


async def test_exec_probe(machine: Machine) -> None:
    probe = {"exec": {"command": python("import sys; sys.exit(1)")}, "failureThreshold": 1}
    await machine.run(
        restartPolicy="Always",
        container={"command": ["sleep", "600"], "livenessProbe": probe},
    )

    async def restarted() -> bool:
        statuses = ((await machine.pod()).get("status") or {}).get("containerStatuses")
        return bool(statuses and statuses[0]["restartCount"] >= 1)

    await machine.until(restarted)


async def test_deletion_runs_the_hook_then_sigterm_and_the_pod_stays_until_then(
    machine: Machine,
) -> None:
    code = """
import os, signal, sys, time
def end(*_):
    print("hook first" if os.path.exists(sys.argv[1]) else "no hook", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(600)
"""
    hook = python("import sys; open(sys.argv[1], 'w')", "/v/hook")
    await machine.run(
        volumes=[{"name": "v", "emptyDir": {}}],
        container={
            "command": python(code, "/v/hook"),
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            "lifecycle": {"preStop": {"exec": {"command": hook}}},
        },
    )
    await machine.printed("up")
    assert EXECUTOR in (await machine.pod())["metadata"]["finalizers"]
    await machine.delete()
    assert (await machine.pod())["metadata"]["deletionTimestamp"]
    await machine.gone()
    assert machine.lines[-1] == ("p", "hook first")


TREE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal, time; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"], start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
{end}
"""


async def pids_of(machine: Machine) -> list[int]:
    async def found() -> list[int]:
        lines = [text.split()[1:] for _, text in machine.lines if text.startswith("pids ")]
        return [int(word) for word in lines[0]] if lines else []

    pids: list[int] = await machine.until(found)
    return pids


@pytest.mark.parametrize("end", ["sys.exit(0)", "time.sleep(600)"])
async def test_what_a_container_has_started_ends_with_it(machine: Machine, end: str) -> None:
    await machine.run(
        terminationGracePeriodSeconds=0, container={"command": python(TREE.format(end=end))}
    )
    pids = await pids_of(machine)
    if end == "sys.exit(0)":
        await machine.phase("Succeeded")
    else:
        await machine.delete()
        await machine.gone()
    assert not any(is_alive(pid) for pid in pids)


async def test_active_deadline(machine: Machine) -> None:
    await machine.run(activeDeadlineSeconds=0.1, container={"command": ["sleep", "600"]})
    pod = await machine.phase("Failed")
    assert pod["status"]["reason"] == "DeadlineExceeded"


async def test_a_stopped_machine_marks_pods_as_disrupted(machine: Machine) -> None:
    await machine.run(container={"command": ["sleep", "600"]})
    await machine.phase("Running")
    await machine.executor.stop()
    pod = await machine.pod()
    assert pod["status"]["phase"] == "Failed"
    assert "DisruptionTarget" in {item["type"] for item in pod["status"]["conditions"]}


async def test_the_next_executor_deals_with_pods_of_one_that_died(
    machine: Machine, tmp_path: Path
) -> None:
    await machine.run("once", container={"command": ["sleep", "600"]})
    await machine.run("always", restartPolicy="Always", container={"command": ["sleep", "600"]})
    await machine.phase("Running", "once")
    await machine.phase("Running", "always")
    machine.executor.kill()
    other = MemoryCluster()
    other.load(machine.cluster.dump())
    await machine.executor.stop()
    follower = Machine(tmp_path, other)
    await follower.executor.adopt()
    once, always = await follower.pod("once"), await follower.pod("always")
    assert once["status"]["phase"] == "Failed"
    assert once["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137
    assert "DisruptionTarget" in {item["type"] for item in once["status"]["conditions"]}
    assert not is_ready(always)
    await follower.phase("Running", "always")
    await follower.delete("always")
    await follower.delete("once")
    follower.executor.kill()
    await follower.gone("always")
    await follower.gone("once")


PARENT = """
import asyncio, pathlib, sys
from inferscale_operator.local.processes import host_environment, start_process
async def main():
    folder = pathlib.Path(sys.argv[1])
    await start_process(sys.argv[2:], host_environment(), folder, folder / "log", print)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    command = python(TREE.format(end="time.sleep(600)"))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), *command], start_new_session=True
    )
    try:
        log = tmp_path / "log"
        async with asyncio.timeout(TIMEOUT):
            while not (log.exists() and log.read_text().endswith("\n")):
                await asyncio.sleep(0.01)
            pids = [int(word) for word in log.read_text().split()[1:]]
            assert all(is_alive(pid) for pid in pids)
            os.kill(parent.pid, signal.SIGKILL)
            while any(is_alive(pid) for pid in pids):
                await asyncio.sleep(0.01)
    finally:
        parent.kill()
        parent.wait()


async def test_config_maps_are_read_when_the_container_starts(machine: Machine) -> None:
    assert await machine.cluster.list(CONFIG_MAP) == []
    await machine.run(
        volumes=[{"name": "c", "configMap": {"name": "none", "optional": True}}],
        container={
            "command": python("import os, sys; print(os.listdir(sys.argv[1]))", "/c"),
            "volumeMounts": [{"name": "c", "mountPath": "/c"}],
        },
    )
    await machine.phase("Succeeded")
    assert machine.lines == [("p", "[]")]


async def test_a_running_container_sees_a_changed_config_map(machine: Machine) -> None:
    plan = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "plan", "namespace": "ns"},
    }
    code = (
        "import os, sys, time\nseen = None\nwhile seen != 'two':\n"
        " text = open(sys.argv[1]).read() if os.path.exists(sys.argv[1]) else 'none'\n"
        " if text != seen: print(text, flush=True)\n"
        " seen = text\n time.sleep(0.01)"
    )
    await machine.run(
        container={
            "command": python(code, "/etc/plan/plan.json"),
            "volumeMounts": [{"name": "plan", "mountPath": "/etc/plan"}],
        },
        volumes=[{"name": "plan", "configMap": {"name": "plan", "optional": True}}],
    )
    await machine.printed("none")
    await machine.cluster.apply({**plan, "data": {"plan.json": "one"}})
    await machine.printed("one")
    await machine.cluster.apply({**plan, "data": {"plan.json": "two"}})
    await machine.phase("Succeeded")
