"""The NVML sampler against a compiled library: figures, MIG, failures and recovery."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from inferscale_runtime.nvml import DeviceMemory, NvmlSampler, ProcessMemory

Fake = Callable[[str], None]
HEALTHY = "init 0 every 0 gpu 1000 300 0 0 -1 gpu 2000 2000 0 0 0 pid 42 250 pid 0 -1"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_figures_of_each_device_and_process(fake: Fake) -> None:
    fake(HEALTHY)
    sample = NvmlSampler(Clock()).sample()
    processes = (ProcessMemory(42, 250), ProcessMemory(0, None))
    assert sample.up
    assert sample.taken_at == 100
    assert sample.devices == (
        DeviceMemory("0", "GPU-0", "Fake H1", 1000, 300, 700, processes),
        DeviceMemory("1", "GPU-1", "Fake H1", 2000, 2000, 0, processes),
    )


def test_mig_instances_stand_for_their_gpu(fake: Fake) -> None:
    fake("init 0 every 0 gpu 1000 300 0 0 2 gpu 500 100 0 0 0")
    devices = NvmlSampler().sample().devices
    assert [(d.device, d.uuid, d.total_bytes, d.used_bytes) for d in devices] == [
        ("0:0", "MIG-0-0", 500, 150),
        ("0:2", "MIG-0-2", 500, 150),
        ("1", "GPU-1", 500, 100),
    ]


def test_one_device_without_figures_does_not_hide_the_others(fake: Fake) -> None:
    fake("init 0 every 0 gpu 1000 300 3 0 -1 gpu 2000 500 0 4 -1 pid 42 250")
    sample = NvmlSampler().sample()
    assert sample.up
    assert sample.devices == (
        DeviceMemory("0", "GPU-0", "Fake H1", reason="Not Supported"),
        DeviceMemory("1", "GPU-1", "Fake H1", 2000, 500, 1500),
    )


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("init 9 every 9", "Driver Not Loaded"),
        ("init 999 every 999", "Unknown Error"),
        ("init 18 every 18", "RM has detected an NVML/RM version mismatch."),
        ("init 0 every 999 gpu 1 1 0 0 -1", "Unknown Error"),
        ("init 0 every 0 gpu 1 1 15 0 -1", "GPU is lost"),
        ("init 0 every 0 gpu 1 1 0 999 -1", "Unknown Error"),
    ],
)
def test_a_failing_driver_is_a_state_and_comes_back(fake: Fake, state: str, reason: str) -> None:
    sampler = NvmlSampler()
    fake(state)
    assert sampler.sample().reason == reason
    assert sampler.sample().reason == reason, "asked again, not given up"
    assert sampler.last.devices == ()
    fake(HEALTHY)
    assert sampler.sample().up
    assert len(sampler.last.devices) == 2
    fake(state)
    assert sampler.sample().reason == reason, "also after it has worked"
    fake(HEALTHY)
    assert sampler.sample().up


def test_failures_leave_the_library_closed_once(fake: Fake, library: Path) -> None:
    import ctypes

    loaded = ctypes.CDLL(str(library))
    sampler = NvmlSampler()
    for _ in range(3):
        fake("init 0 every 999")
        sampler.sample()
        assert loaded.fake_open_count() == 0
        fake(HEALTHY)
        sampler.sample()
        sampler.sample()
        assert loaded.fake_open_count() == 1


def test_a_broken_library_is_a_state(tmp_path: Path) -> None:
    # In a process of its own, because a loaded library stays; the broken file hides a real one.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    code = (
        "from inferscale_runtime.nvml import NvmlSampler\n"
        "sampler = NvmlSampler()\n"
        "print(sampler.sample().reason)\n"
        "print(sampler.sample().reason)\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == ["NVML Shared Library Not Found"] * 2


def test_a_missing_package_is_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sampler = NvmlSampler()
    assert sampler.sample().reason == "the package nvidia-ml-py is not installed"
    assert not sampler.status()["up"]


def test_status_is_json_with_the_age(fake: Fake) -> None:
    fake(HEALTHY)
    clock = Clock()
    sampler = NvmlSampler(clock)
    assert sampler.status()["reason"] == "not sampled yet"
    sampler.sample()
    clock.now += 7
    status = json.loads(json.dumps(sampler.status()))
    assert status["up"] is True
    assert status["age_seconds"] == 7
    assert status["devices"][0]["free_bytes"] == 700
    assert status["devices"][0]["processes"][0] == {"pid": 42, "used_bytes": 250}


def test_gauges_follow_the_last_sample(fake: Fake) -> None:
    clock = Clock()
    sampler = NvmlSampler(clock)
    registry = CollectorRegistry()
    registry.register(sampler)
    fake(HEALTHY)
    sampler.sample()
    clock.now += 3
    labels = {"device": "0", "uuid": "GPU-0"}
    assert registry.get_sample_value("inferscale_nvml_up") == 1
    assert registry.get_sample_value("inferscale_nvml_sample_age_seconds") == 3
    for kind, value in (("total", 1000), ("used", 300), ("free", 700)):
        name = f"inferscale_gpu_memory_{kind}_bytes"
        assert registry.get_sample_value(name, labels) == value
    used = "inferscale_gpu_process_memory_bytes"
    assert registry.get_sample_value(used, {"device": "1", "pid": "42"}) == 250
    fake("init 999 every 999")
    sampler.sample()
    assert registry.get_sample_value("inferscale_nvml_up") == 0
    assert registry.get_sample_value("inferscale_gpu_memory_total_bytes", labels) is None


def test_the_thread_samples_until_it_is_stopped(fake: Fake) -> None:
    fake(HEALTHY)
    enough = threading.Event()
    counted = 0

    def clock() -> float:
        nonlocal counted
        counted += 1
        if counted >= 4:
            enough.set()
        return float(counted)

    sampler = NvmlSampler(clock)
    sampler.start(seconds=0.001)
    assert enough.wait(30)
    sampler.stop()
    assert sampler._thread is not None
    sampler._thread.join(30)
    assert not sampler._thread.is_alive()
    assert sampler.last.up
