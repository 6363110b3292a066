"""GPU memory as the driver sees it: total, used and free per device, use per process.

API process; one thread samples, everyone else reads the last sample. No NVML is a state with a
reason, never an error: the library may be missing, the driver not loaded, or a container may lose
its devices while it runs ("Unknown Error"). After any such failure the library is initialised again
with the next sample. A call into a wedged driver may never return: the age of the last sample then
grows, and readers take it for stale.

With MIG on, the instances are listed instead of the GPU they belong to.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

logger = logging.getLogger("vllm.inferscale.nvml")

SAMPLE_SECONDS = 5.0
"""Between two samples (arbitrary: placement plans for minutes)."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process on a device.

    Attributes:
        pid: In the host's numbering; in a container it may be 0.
        used_bytes: None when the driver does not say.
    """

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One GPU, or one MIG instance.

    Attributes:
        device: ``"0"``, or ``"0:1"`` for instance 1 of GPU 0.
        uuid: As in ``nvidia-smi -L``.
        name: Product name.
        total_bytes: None when the driver does not say (``reason`` tells why), as are the next two.
        used_bytes: Used by all processes of the machine.
        free_bytes: Free.
        processes: Compute processes; empty when the driver does not list them.
        reason: Why figures are missing, or None.
    """

    device: str
    uuid: str
    name: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    processes: tuple[ProcessMemory, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class NvmlSample:
    """What one look at the driver gave.

    Attributes:
        taken_at: Unix time in seconds.
        reason: Why there are no figures, or None.
        devices: Empty when there are none.
    """

    taken_at: float
    reason: str | None
    devices: tuple[DeviceMemory, ...] = ()

    @property
    def up(self) -> bool:
        """Whether the driver answered."""
        return self.reason is None


class NvmlSampler:
    """Samples the driver.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._library: Any = None
        self._open = False
        self._last = NvmlSample(clock(), "not sampled yet")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def last(self) -> NvmlSample:
        """The newest sample."""
        return self._last

    def sample(self) -> NvmlSample:
        """Asks the driver now; blocks, and never raises for what the driver does."""
        now = self._clock()
        try:
            sample = NvmlSample(now, None, self._read())
        except ImportError:
            sample = NvmlSample(now, "the package nvidia-ml-py is not installed")
        except self._errors() as error:
            self._close()
            sample = NvmlSample(now, str(error))
        if sample.reason != self._last.reason:
            logger.info("NVML: %s", sample.reason or f"{len(sample.devices)} devices")
        self._last = sample
        return sample

    def start(self, seconds: float = SAMPLE_SECONDS) -> None:
        """Samples in a thread until ``stop``."""

        def run() -> None:
            while True:
                self.sample()
                if self._stop.wait(seconds):
                    return

        self._stop.clear()
        self._thread = threading.Thread(target=run, name="inferscale-nvml", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; does not wait for a driver that hangs."""
        self._stop.set()

    def status(self) -> dict[str, Any]:
        """The last sample for the status route."""
        last = self._last
        return {
            "up": last.up,
            "reason": last.reason,
            "taken_at": last.taken_at,
            "age_seconds": round(max(0.0, self._clock() - last.taken_at), 3),
            "devices": [asdict(device) for device in last.devices],
        }

    def collect(self) -> Iterator[Any]:
        """Gauges of the last sample, for ``prometheus_client.REGISTRY.register(sampler)``."""
        from prometheus_client.core import GaugeMetricFamily

        last = self._last
        yield GaugeMetricFamily(
            "inferscale_nvml_up", "1 when the GPU driver answered the last sample.", float(last.up)
        )
        yield GaugeMetricFamily(
            "inferscale_nvml_sample_age_seconds",
            "Age of the last sample of the GPU driver.",
            max(0.0, self._clock() - last.taken_at),
        )
        for kind in ("total", "used", "free"):
            family = GaugeMetricFamily(
                f"inferscale_gpu_memory_{kind}_bytes",
                f"GPU memory, {kind}, as the driver counts it.",
                labels=["device", "uuid"],
            )
            for device in last.devices:
                value = getattr(device, f"{kind}_bytes")
                if value is not None:
                    family.add_metric([device.device, device.uuid], value)
            yield family
        processes = GaugeMetricFamily(
            "inferscale_gpu_process_memory_bytes",
            "GPU memory of one compute process.",
            labels=["device", "pid"],
        )
        for device in last.devices:
            for process in device.processes:
                if process.used_bytes is not None:
                    processes.add_metric([device.device, str(process.pid)], process.used_bytes)
        yield processes

    def _errors(self) -> type[Exception] | tuple[()]:
        return self._library.NVMLError if self._library is not None else ()

    def _read(self) -> tuple[DeviceMemory, ...]:
        if self._library is None:
            # Untyped, and importing it is all that a machine without a GPU ever does with it.
            self._library = importlib.import_module("pynvml")
        nvml = self._library
        if not self._open:
            nvml.nvmlInit()
            self._open = True
        devices: list[DeviceMemory] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            instances = list(self._mig_instances(handle))
            if instances:
                devices += [self._device(f"{index}:{n}", child) for n, child in instances]
            else:
                devices.append(self._device(str(index), handle))
        return tuple(devices)

    def _mig_instances(self, handle: Any) -> Iterator[tuple[int, Any]]:
        nvml = self._library
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(handle)
            count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current else 0
        except self._refusals():
            return
        for number in range(count):
            try:
                yield number, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except nvml.NVMLError_NotFound:
                continue  # a free place

    def _device(self, label: str, handle: Any) -> DeviceMemory:
        nvml = self._library
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._refusals() as error:
            return DeviceMemory(label, uuid, name, reason=str(error))
        try:
            listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._refusals():
            listed = []
        processes = tuple(ProcessMemory(p.pid, p.usedGpuMemory) for p in listed)
        return DeviceMemory(
            label, uuid, name, memory.total, memory.used, memory.free, processes, None
        )

    def _refusals(self) -> tuple[type[Exception], ...]:
        """Answers about one device that say nothing about the driver's health."""
        nvml = self._library
        return (
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_NoPermission,
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_InsufficientSize,  # processes came between two calls
        )

    def _close(self) -> None:
        if self._open:
            self._open = False
            try:
                self._library.nvmlShutdown()
            except self._errors() as error:
                logger.debug("NVML did not shut down: %s", error)
