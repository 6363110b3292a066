"""Probes of containers: thresholds (pure) and the checks themselves (I/O)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOOPBACK = "127.0.0.1"

Run = Callable[[Sequence[str], float], Awaitable[bool]]
"""Runs a command in the container's environment, within a time: whether it ended with 0."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times and thresholds of a probe, with Kubernetes' defaults."""

    initial_delay: float
    period: float
    timeout: float
    success_threshold: int
    failure_threshold: int

    @classmethod
    def of(cls, probe: Mapping[str, Any]) -> Timing:
        """Reads a probe of a manifest."""
        return cls(
            initial_delay=float(probe.get("initialDelaySeconds") or 0),
            period=float(probe.get("periodSeconds") or 10),
            timeout=float(probe.get("timeoutSeconds") or 1),
            success_threshold=int(probe.get("successThreshold") or 1),
            failure_threshold=int(probe.get("failureThreshold") or 3),
        )


class Threshold:
    """Turns single results into a verdict."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._last: bool | None = None
        self._count = 0

    def observe(self, success: bool) -> bool | None:
        """Takes one result.

        Returns:
            True or False once there were enough equal results in a row, else None.
        """
        self._count = self._count + 1 if success == self._last else 1
        self._last = success
        needed = self._timing.success_threshold if success else self._timing.failure_threshold
        return success if self._count >= needed else None


def local_port(port: str | int, container: Mapping[str, Any], ports: Mapping[str, int]) -> int:
    """The port of this machine that stands for a port name or container port."""
    for item in container.get("ports") or []:
        name = item.get("name")
        if name in ports and port in (name, item["containerPort"], str(item["containerPort"])):
            return ports[name]
    return int(port)


async def http_get(
    port: int, path: str, timeout: float, headers: Sequence[Mapping[str, str]] = ()
) -> tuple[int, bytes]:
    """GET on loopback.

    Returns:
        Status and body; status 0 when there was no answer in time.
    """
    # HTTP/1.0: the server closes the connection behind the body, so there is nothing to frame.
    lines = [f"GET {path} HTTP/1.0", f"Host: {LOOPBACK}:{port}", "Accept: */*"]
    lines += [f"{header['name']}: {header['value']}" for header in headers]
    request = "\r\n".join([*lines, "", ""]).encode()
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            try:
                writer.write(request)
                answer = await reader.read()
            finally:
                writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), body
    except (OSError, TimeoutError, ValueError, IndexError):
        return 0, b""


async def check(
    probe: Mapping[str, Any], container: Mapping[str, Any], ports: Mapping[str, int], run: Run
) -> bool:
    """Carries out one probe.

    Args:
        probe: The probe of the manifest.
        container: Its container.
        ports: Port of this machine for each named port.
        run: For ``exec``.
    """
    timeout = Timing.of(probe).timeout
    if "httpGet" in probe:
        action = probe["httpGet"]
        port = local_port(action["port"], container, ports)
        status, _ = await http_get(
            port, action.get("path") or "/", timeout, action.get("httpHeaders") or ()
        )
        return 200 <= status < 400
    if "tcpSocket" in probe:
        return await _connects(local_port(probe["tcpSocket"]["port"], container, ports), timeout)
    if "exec" in probe:
        return await run(probe["exec"]["command"], timeout)
    return True


async def _connects(port: int, timeout: float) -> bool:
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(LOOPBACK, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
