"""From a container of a manifest to a local process: one place where all rewriting meets (I/O)."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferscale_operator.cluster.errors import ClusterError
from inferscale_operator.desired.kinds import CLAIM, CONFIG_MAP, SECRET, Kind, Manifest
from inferscale_operator.local import probes
from inferscale_operator.local.containers import Running
from inferscale_operator.local.environment import Lookup, MissingError, container_environment
from inferscale_operator.local.expansion import expand, local_arguments, rewrite
from inferscale_operator.local.processes import (
    Process,
    StartError,
    host_environment,
    program,
    start_process,
)
from inferscale_operator.local.volumes import VolumeFolders

TERMINATION_LOG = "/dev/termination-log"
FOLLOW_SECONDS = 5.0
"""Between two looks at the ConfigMaps of a running container; a kubelet takes about a minute."""

OnLine = Callable[[str, str], None]
"""Gets (pod name, line) of every output line."""


Read = Callable[[Kind, str, str], Awaitable[Manifest | None]]
"""Reads an object by kind, namespace and name."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A container made fit for this machine."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    mounts: Mapping[str, str]
    folder: str


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((probes.LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def assign_ports(pod: Manifest) -> dict[str, int]:
    """A port of this machine for each named port of a pod."""
    names = [
        item["name"]
        for container in pod["spec"]["containers"]
        for item in container.get("ports") or []
        if item.get("name")
    ]
    return {name: free_port() for name in names}


def references(pod: Manifest) -> set[tuple[Kind, str]]:
    """ConfigMaps, Secrets and claims that a pod names, wherever it does."""
    found: set[tuple[Kind, str]] = set()
    fields = (
        ("configMap", CONFIG_MAP),
        ("configMapRef", CONFIG_MAP),
        ("configMapKeyRef", CONFIG_MAP),
        ("secret", SECRET),
        ("secretRef", SECRET),
        ("secretKeyRef", SECRET),
        ("persistentVolumeClaim", CLAIM),
    )

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            for field, kind in fields:
                body = value.get(field)
                if isinstance(body, dict):
                    names = (body.get(key) for key in ("name", "secretName", "claimName"))
                    found.update((kind, name) for name in names if isinstance(name, str))
            for item in value.values():
                walk(item)

    walk(pod["spec"])
    return found


async def look_up(read: Read, pod: Manifest) -> Lookup:
    """Reads all objects that a pod names."""
    namespace = pod["metadata"]["namespace"]
    objects = {(kind, name): await read(kind, namespace, name) for kind, name in references(pod)}
    return lambda kind, name: objects.get((kind, name))


def prepare(
    pod: Manifest,
    container: Mapping[str, Any],
    ports: Mapping[str, int],
    lookup: Lookup,
    folders: VolumeFolders,
    host: Mapping[str, str],
) -> Prepared:
    """Expands and rewrites what the manifest says; makes the folders of its volumes.

    Raises:
        MissingError: Naming what is missing.
        StartError: When the manifest asks for something that is not done here.
    """
    _refuse_unsupported(pod, container)
    variables = container_environment(pod, container, ports, lookup)
    mounts = folders.mounts(pod, container, lookup)
    own = folders.pod(pod)
    # Not below a mount of /dev: the file stands for the kubelet's own.
    message = own / "termination" / container["name"]
    message.parent.mkdir(parents=True, exist_ok=True)
    message.write_bytes(b"")
    path = container.get("terminationMessagePath") or TERMINATION_LOG
    mounts = {**mounts, path: str(message)}
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    words = [rewrite(expand(word, variables), mounts) for word in words]
    folder = own / "work"
    folder.mkdir(parents=True, exist_ok=True)
    # What is a path of this machine already must not be rewritten: it may lie below a mount path.
    wanted = container.get("workingDir")
    environment = {name: rewrite(value, mounts) for name, value in variables.items()}
    return Prepared(
        command=tuple(program(local_arguments(words))),
        environment={**host, **environment},
        mounts=mounts,
        folder=rewrite(wanted, mounts) if wanted else str(folder),
    )


def _refuse_unsupported(pod: Manifest, container: Mapping[str, Any]) -> None:
    name = container["name"]
    if pod["spec"].get("initContainers"):
        raise StartError("init containers are not run here")
    if not container.get("command"):
        raise StartError(f'container "{name}" names no command; images are not run here')
    for field in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(field) or {}
        scheme = (probe.get("httpGet") or {}).get("scheme", "HTTP")
        if "grpc" in probe or scheme != "HTTP":
            raise StartError(f'container "{name}": {field} by gRPC or HTTPS is not done here')


class LocalContainer:
    """A started container: its process with probes, hooks and termination message."""

    def __init__(
        self,
        process: Process,
        spec: Mapping[str, Any],
        prepared: Prepared,
        ports: Mapping[str, int],
        log: Path,
        follow: Callable[[], Awaitable[None]],
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._spec = spec
        self._prepared = prepared
        self._ports = ports
        self._log = log
        self._follow = follow

    async def wait(self) -> int:
        """The exit status; the files of ConfigMaps are kept up to date meanwhile."""
        following = asyncio.ensure_future(self._follow())
        try:
            return await self._process.wait()
        finally:
            following.cancel()

    def terminate(self) -> None:
        """SIGTERM to the command."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to all of it."""
        self._process.kill()

    def message(self, code: int) -> str:
        """The termination message: its file, else the end of the log of a failed container."""
        path = self._spec.get("terminationMessagePath") or TERMINATION_LOG
        try:
            text = Path(self._prepared.mounts[path]).read_text(errors="replace")
        except OSError:
            text = ""
        policy = self._spec.get("terminationMessagePolicy")
        if not text and code != 0 and policy == "FallbackToLogsOnError":
            return self._process.tail()
        return text

    async def probe(self, probe: Mapping[str, Any]) -> bool:
        """Carries out one probe."""
        return await probes.check(probe, self._spec, self._ports, self._run)

    async def hook(self, handler: Mapping[str, Any]) -> None:
        """Carries out a lifecycle handler; a failure does not matter, as in a kubelet."""
        if "sleep" in handler:
            await asyncio.sleep(float(handler["sleep"]["seconds"]))
        elif "exec" in handler:
            await self._run(handler["exec"]["command"], None)
        elif "httpGet" in handler:
            await self.probe({"httpGet": handler["httpGet"], "timeoutSeconds": 30})

    async def _run(self, words: Sequence[str], timeout: float | None) -> bool:
        # Commands of probes and hooks are not expanded: Kubernetes does not do it either.
        command = program([rewrite(word, self._prepared.mounts) for word in words])
        environment = dict(self._prepared.environment)
        folder = Path(self._prepared.folder)
        try:
            process = await start_process(
                command, environment, folder, self._log, lambda _line: None
            )
        except StartError:
            return False
        try:
            async with asyncio.timeout(timeout):
                return await process.wait() == 0
        except TimeoutError:
            return False
        finally:
            process.kill()


class Launcher:
    """Starts containers of pods on this machine.

    Args:
        read: Reads ConfigMaps, Secrets with their values, and claims.
        folders: Where volumes lie.
        on_line: Gets every line of output.
        host: Variables that every container gets; those of this process by default.
        follow_seconds: Between two looks at the ConfigMaps of a running container.
    """

    def __init__(
        self,
        read: Read,
        folders: VolumeFolders,
        on_line: OnLine,
        host: Mapping[str, str] | None = None,
        follow_seconds: float = FOLLOW_SECONDS,
    ) -> None:
        self._read = read
        self._folders = folders
        self._on_line = on_line
        self._host = host_environment() if host is None else dict(host)
        self._follow_seconds = follow_seconds

    async def launch(
        self, pod: Manifest, container: Mapping[str, Any], ports: Mapping[str, int]
    ) -> Running:
        """Starts one container.

        Raises:
            MissingError: Something that the manifest names is not there.
            StartError: The command cannot be started.
        """
        lookup = await look_up(self._read, pod)
        prepared = prepare(pod, container, ports, lookup, self._folders, self._host)
        name = pod["metadata"]["name"]
        log = self.log_of(pod, container["name"])
        process = await start_process(
            prepared.command,
            prepared.environment,
            Path(prepared.folder),
            log,
            lambda line: self._on_line(name, line),
        )
        return LocalContainer(
            process,
            container,
            prepared,
            ports,
            log.with_suffix(".hooks.log"),
            lambda: self._follow(pod, container, prepared.mounts),
        )

    async def _follow(
        self, pod: Manifest, container: Mapping[str, Any], mounts: Mapping[str, str]
    ) -> None:
        """Brings ConfigMaps and Secrets up to date; while one is missing, none changes."""
        volumes = pod["spec"].get("volumes") or []
        names = [(CONFIG_MAP, v["configMap"]["name"]) for v in volumes if "configMap" in v]
        names += [(SECRET, v["secret"]["secretName"]) for v in volumes if "secret" in v]
        namespace = pod["metadata"]["namespace"]
        while names:
            await asyncio.sleep(self._follow_seconds)
            try:
                live = {key: await self._read(key[0], namespace, key[1]) for key in names}
                self._folders.follow(pod, container, _among(live), mounts)
            except (ClusterError, MissingError, OSError):
                continue

    def log_of(self, pod: Manifest, container: str) -> Path:
        """The log file of a container; it stays when the pod goes."""
        metadata = pod["metadata"]
        folder = self._folders.data / "logs" / str(metadata["namespace"])
        return folder / str(metadata["name"]) / f"{container}.log"

    def forget(self, pod: Manifest) -> None:
        """Removes what a pod leaves, apart from its logs and claims."""
        self._folders.remove_pod(pod)

    def close(self) -> None:
        """Removes what is of use only while this program runs."""
        shutil.rmtree(self._folders.memory, ignore_errors=True)


def _among(objects: Mapping[tuple[Kind, str], Manifest | None]) -> Lookup:
    return lambda kind, name: objects.get((kind, name))
