"""A node for the whole-system test: runs a namespace's Jobs and Pods as processes of this machine.

    python -m tests.e2e.node KUBECONFIG NAMESPACE DATA SERVICE PORT

What a cluster has and the test's API server has not: a Job controller, volumes, a kubelet and a way
to a Service. It is the executor of ``inferscale up``, over a real API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

from inferscale_operator.cluster.client import ApiCluster
from inferscale_operator.cluster.errors import ClusterError
from inferscale_operator.cluster.transport import Transport, load_configuration
from inferscale_operator.local.controllers import ClaimBinder, JobController
from inferscale_operator.local.executor import Executor
from inferscale_operator.local.launch import Launcher
from inferscale_operator.local.processes import host_environment
from inferscale_operator.local.service_proxy import ServiceProxy
from inferscale_operator.local.volumes import VolumeFolders, memory_folder

LOOK_SECONDS = 0.3


async def run(kubeconfig: str, namespace: str, data: Path, service: str, port: int) -> None:
    """Plays the node until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    transport = Transport(await load_configuration(kubeconfig, None))
    cluster = ApiCluster(transport)
    folders = VolumeFolders(data, memory_folder(data))
    servers = ServiceProxy(cluster, namespace, f"{service}-servers")
    # What DNS and a service account are to the activator's pod in a cluster.
    here = {
        "INFERSCALE_TARGET": f"http://127.0.0.1:{await servers.start(0)}",
        "INFERSCALE_KUBECONFIG": kubeconfig,
        # Every server has all cores of this machine: threads that wait must not keep them busy.
        "OMP_WAIT_POLICY": "passive",
    }
    launcher = Launcher(
        cluster.get,
        folders,
        lambda pod, line: print(f"{pod} | {line}", flush=True),
        host_environment() | here,
    )
    executor = Executor(cluster, launcher, namespace)
    jobs, claims = JobController(cluster, namespace), ClaimBinder(cluster, folders, namespace)
    proxy = ServiceProxy(cluster, namespace, service)
    await proxy.start(port)
    print("node: ready", flush=True)
    while not stop.is_set():
        for part in (jobs, claims, executor):
            try:
                await part.sync()
            except ClusterError as error:
                print(f"node: {error}", flush=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await stop.wait()
    executor.kill()
    await executor.stop()
    await proxy.close()
    await servers.close()
    await cluster.close()
    await transport.close()


if __name__ == "__main__":
    logging.basicConfig(format="node: %(asctime)s %(message)s", level=logging.INFO)
    kubeconfig, namespace, data, service, port = sys.argv[1:]
    asyncio.run(run(kubeconfig, namespace, Path(data), service, int(port)))
