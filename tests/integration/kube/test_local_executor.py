"""The executor and the Job controller of ``up`` on a real API server, with small processes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.kube.control_plane import ControlPlane

from inferscale_operator.cluster.client import ApiCluster
from inferscale_operator.cluster.transport import Transport, load_configuration
from inferscale_operator.desired.kinds import CONFIG_MAP, DEPLOYMENT, JOB, POD, Manifest
from inferscale_operator.desired.paths import PORTS_ANNOTATION
from inferscale_operator.local.controllers import JobController
from inferscale_operator.local.executor import Executor
from inferscale_operator.local.job_plan import finished
from inferscale_operator.local.launch import Launcher
from inferscale_operator.local.pod_status import is_ready
from inferscale_operator.local.volumes import VolumeFolders

TIMEOUT = 120.0

SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(os.environ["INFERSCALE_PORT"])), Handler).serve_forever()
"""


def pod_spec(code: str, **container: Any) -> Manifest:
    main = {"name": "main", "image": "i", "command": [sys.executable, "-c", code], **container}
    return {"containers": [main], "terminationGracePeriodSeconds": 5}


class Machine:
    """An executor and a Job controller of one namespace."""

    def __init__(self, transport: Transport, namespace: str, folder: Path) -> None:
        self.cluster = ApiCluster(transport)
        self.namespace = namespace
        folders = VolumeFolders(folder / "data", folder / "memory")
        launcher = Launcher(self.cluster.get, folders, lambda _pod, _line: None)
        self.executor = Executor(self.cluster, launcher, namespace)
        self.jobs = JobController(self.cluster, namespace)

    async def until(self, condition: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(TIMEOUT):
            while True:
                await self.jobs.sync()
                await self.executor.sync()
                if found := await condition():
                    return found
                await asyncio.sleep(0.1)

    async def no_pods(self) -> bool:
        return await self.cluster.list(POD, self.namespace) == []

    async def create(self, kind: str, version: str, spec: Manifest) -> None:
        metadata = {"name": "x", "namespace": self.namespace}
        await self.cluster.create(
            {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
        )


def on_machine(
    plane: ControlPlane, namespace: str, folder: Path, story: Callable[[Machine], Awaitable[None]]
) -> None:
    async def run() -> None:
        configuration = await load_configuration(str(plane.kubeconfig), None)
        transport = Transport(configuration)
        machine = Machine(transport, namespace, folder)
        try:
            await story(machine)
        finally:
            machine.executor.kill()
            await machine.executor.stop()
            await machine.cluster.close()
            await transport.close()

    asyncio.run(run())


def test_a_job_runs_to_its_end_and_reports(
    controlled_plane: ControlPlane, controlled_namespace: str, tmp_path: Path
) -> None:
    async def story(machine: Machine) -> None:
        code = "import os, sys; open(sys.argv[1], 'w').write(os.environ['JOB_COMPLETION_INDEX'])"
        spec = pod_spec(code, args=["/dev/termination-log"]) | {"restartPolicy": "Never"}
        job = {
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "backoffLimit": 0,
            "template": {"metadata": {"labels": {"l": "x"}}, "spec": spec},
        }
        await machine.create("Job", "batch/v1", job)

        async def ended() -> Manifest | None:
            live = await machine.cluster.get(JOB, machine.namespace, "x")
            return finished(live) if live else None

        assert (await machine.until(ended))["type"] == "Complete"
        pods = await machine.cluster.list(POD, machine.namespace)
        states = [pod["status"]["containerStatuses"][0]["state"] for pod in pods]
        assert sorted(state["terminated"]["message"] for state in states) == ["0", "1"]
        live = await machine.cluster.get(JOB, machine.namespace, "x")
        assert live is not None
        name, uid = live["metadata"]["name"], live["metadata"]["uid"]
        await machine.cluster.delete(JOB, machine.namespace, name, uid)
        await machine.until(machine.no_pods)

    on_machine(controlled_plane, controlled_namespace, tmp_path, story)


def test_pods_of_a_real_deployment_become_ready_and_go_with_it(
    controlled_plane: ControlPlane, controlled_namespace: str, tmp_path: Path
) -> None:
    async def story(machine: Machine) -> None:
        ports = [{"name": "http", "containerPort": 8000, "protocol": "TCP"}]
        probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1}
        spec = pod_spec(SERVER, ports=ports, readinessProbe=probe) | {"restartPolicy": "Always"}
        deployment = {
            "replicas": 1,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": 600,
            "selector": {"matchLabels": {"l": "x"}},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": {"metadata": {"labels": {"l": "x"}}, "spec": spec},
        }
        await machine.create("Deployment", "apps/v1", deployment)

        async def available() -> bool:
            live = await machine.cluster.get(DEPLOYMENT, machine.namespace, "x")
            return bool(live and (live.get("status") or {}).get("availableReplicas"))

        await machine.until(available)
        (pod,) = await machine.cluster.list(POD, machine.namespace)
        assert is_ready(pod)
        assert json.loads(pod["metadata"]["annotations"][PORTS_ANNOTATION])["http"] > 0
        live = await machine.cluster.get(DEPLOYMENT, machine.namespace, "x")
        assert live is not None
        await machine.cluster.delete(DEPLOYMENT, machine.namespace, "x", live["metadata"]["uid"])
        await machine.until(machine.no_pods)

    on_machine(controlled_plane, controlled_namespace, tmp_path, story)


@pytest.mark.parametrize("optional", [True, False])
def test_a_pod_that_is_deleted_before_it_starts_goes(
    controlled_plane: ControlPlane, controlled_namespace: str, tmp_path: Path, optional: bool
) -> None:
    async def story(machine: Machine) -> None:
        assert await machine.cluster.get(CONFIG_MAP, machine.namespace, "none") is None
        source = [{"configMapRef": {"name": "none", "optional": optional}}]
        spec = pod_spec("import time; time.sleep(600)", envFrom=source)
        await machine.create("Pod", "v1", spec | {"restartPolicy": "Never"})

        async def begun() -> bool:
            pod = await machine.cluster.get(POD, machine.namespace, "x")
            phase = ((pod or {}).get("status") or {}).get("phase")
            return bool(phase == ("Running" if optional else "Pending"))

        await machine.until(begun)
        pod = await machine.cluster.get(POD, machine.namespace, "x")
        assert pod is not None
        await machine.cluster.delete(POD, machine.namespace, "x", pod["metadata"]["uid"])
        await machine.until(machine.no_pods)

    on_machine(controlled_plane, controlled_namespace, tmp_path, story)
