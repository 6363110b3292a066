"""Many resources at once: all reach their Jobs, memory stays small, rest is rest."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.integration.kube.api import Api
from tests.integration.kube.control_plane import ControlPlane, eventually
from tests.integration.kube.operator_process import running_operator
from tests.integration.kube.proxy import running_proxy
from tests.integration.kube.resources import facts, memory_store

COUNT = int(os.environ.get("INFERSCALE_TEST_STORES", "50"))
"""Set it to 1000 for the full run."""
IDLE_SECONDS = float(os.environ.get("INFERSCALE_TEST_IDLE_SECONDS", "0"))
"""Set it to 600 for the full run: no write in so many seconds at rest."""
NO_EVENTS = r"^(?!.*/events)"
MEMORY_BYTES = 300 * 1024 * 1024


@pytest.fixture
def api(control_plane: ControlPlane, namespace: str) -> Api:
    return Api(control_plane.kubeconfig, namespace)


def test_many_stores_reach_their_jobs(
    api: Api, control_plane: ControlPlane, tmp_path: Path
) -> None:
    api.create("configmaps", facts())
    with (
        running_proxy(control_plane.kubeconfig, tmp_path) as proxy,
        running_operator(proxy.kubeconfig, api.namespace, tmp_path) as operator,
    ):
        with ThreadPoolExecutor(4) as pool:
            names = [f"m{number}" for number in range(COUNT)]
            list(pool.map(lambda name: api.create("memorystores", memory_store(name)), names))
        eventually(
            lambda: len(api.names("jobs")) == COUNT, f"{COUNT} Jobs", seconds=60 + COUNT * 0.6
        )
        eventually(
            lambda: operator.metric("inferscale_operator_queue_depth") == 0,
            "the queue ends",
            seconds=60 + COUNT * 0.4,
        )
        assert operator.metric("inferscale_operator_errors_total") == 0
        assert operator.peak_bytes() < MEMORY_BYTES, f"{operator.peak_bytes() >> 20} MiB"
        print(f"{COUNT} stores: peak {operator.peak_bytes() >> 20} MiB")

        before = operator.metric("inferscale_operator_reconciles_total")
        # Events of the start are still being posted, one after the other.
        writes = len(proxy.writes(NO_EVENTS))
        eventually(
            lambda: operator.metric("inferscale_operator_reconciles_total") >= before + COUNT,
            "every running Job was looked at again",
            seconds=60 + COUNT * 0.5,
        )
        if IDLE_SECONDS:
            time.sleep(IDLE_SECONDS)
        assert len(proxy.writes(NO_EVENTS)) == writes
