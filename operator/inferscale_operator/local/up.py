"""``inferscale up``: the operator's own planners and builders over a cluster in memory.

One event loop holds everything: the reconcilers, the controllers, the executor and the proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from inferscale_operator.cluster.cache import ChildCache, OwnerKey
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.kinds import (
    CLAIM,
    CONFIG_MAP,
    CUSTOM_KINDS,
    MEMORY_STORE,
    PERSONALIZED_MODEL,
    SECRET,
    Manifest,
    kind_of,
)
from inferscale_operator.desired.paths import PORTS_ANNOTATION
from inferscale_operator.handlers.events import Router
from inferscale_operator.handlers.hearing import Hearing
from inferscale_operator.handlers.reconciler import Reconciler
from inferscale_operator.handlers.work_queue import WorkQueue
from inferscale_operator.local.activators import LocalActivators
from inferscale_operator.local.asking import Announcer
from inferscale_operator.local.console import Console
from inferscale_operator.local.controllers import ClaimBinder, DeploymentController, JobController
from inferscale_operator.local.data_folder import DataFolder
from inferscale_operator.local.documents import DocumentError, moved_store, without_routers
from inferscale_operator.local.executor import Executor
from inferscale_operator.local.files import ManifestFiles
from inferscale_operator.local.launch import Launcher
from inferscale_operator.local.memory_cluster import Change, MemoryCluster
from inferscale_operator.local.probes import http_get
from inferscale_operator.local.service_proxy import ServiceProxy
from inferscale_operator.local.state_file import StateError, load_state, save_state
from inferscale_operator.local.volumes import VolumeFolders, memory_folder
from inferscale_operator.planner import memorystore, personalizedmodel
from inferscale_runtime.budget import ConfigError

MANAGER = "inferscale-up"
PLANS = {
    MEMORY_STORE.kind: memorystore.plan,
    PERSONALIZED_MODEL.kind: personalizedmodel.plan,
}
WORKERS = 2
LOOK_SECONDS = 1.0
"""Longest pause between two looks of the controllers; changes wake them at once."""
QUIET_SECONDS = 0.05
"""Pause after a change, so that several that belong together are one look."""
FILE_SECONDS = 2.0
"""How often the files are looked at for changes."""
_ASK_SECONDS = 2.0
_IMAGE = "this installation"


@dataclass(frozen=True, slots=True)
class UpSettings:
    """What to run.

    Attributes:
        files: Files with manifests.
        data: Data folder.
        port: Port of the first PersonalizedModel; the others follow.
        volumes: Folder for each existing claim.
        prune: Whether objects that are in no file any more are deleted.
    """

    files: Sequence[Path]
    data: Path = Path(".inferscale")
    port: int = 8000
    volumes: Mapping[str, Path] = field(default_factory=dict)
    prune: bool = False


class _NoReports:
    """Figures of the reconciler go nowhere here."""

    def reconciled(self, key: OwnerKey, result: str, seconds: float) -> None:
        """Not kept."""

    def failed(self, key: OwnerKey, reason: str) -> None:
        """Not kept."""

    def conditions(self, key: OwnerKey, conditions: Mapping[str, str]) -> None:
        """Printed from the objects themselves."""

    def gone(self, key: OwnerKey) -> None:
        """Printed from the objects themselves."""


async def read_local_pod(pod: Manifest, port: str, path: str) -> str | None:
    """GET of a text from a pod of this machine."""
    text = (pod["metadata"].get("annotations") or {}).get(PORTS_ANNOTATION)
    number = json.loads(text).get(port) if text else None
    if number is None:
        return None
    status, body = await http_get(number, path, _ASK_SECONDS)
    return body.decode(errors="replace") if status == 200 else None


async def ask_local_pod(pod: Manifest, port: str, path: str) -> Mapping[str, object] | None:
    """GET of a JSON object from a pod of this machine."""
    text = await read_local_pod(pod, port, path)
    try:
        value = json.loads(text) if text is not None else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class Up:
    """One run of ``inferscale up``.

    Args:
        settings: What to run.
        console: Where to print.
    """

    def __init__(self, settings: UpSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._folder = DataFolder(settings.data)
        self._files = ManifestFiles(settings.files, settings.volumes)
        self._cluster = MemoryCluster(ask=ask_local_pod, read=read_local_pod)
        self._cache = ChildCache()
        self._queue = WorkQueue()
        self._router = Router(self._cache, self._queue, Hearing())
        self._activators = LocalActivators(self._cluster)
        defaults = Defaults(runtime_image=_IMAGE)
        self._reconciler = Reconciler(
            self._cluster,
            self._cache,
            self._queue,
            PLANS,
            defaults,
            _NoReports(),
            self._router.wrote,
            models_of=self._router.models_of,
            held=self._activators.held,
        )
        self._stop = asyncio.Event()
        self._dirty = asyncio.Event()
        self._unsaved = False
        self._speaking = False
        self._proxies: dict[tuple[str, str], tuple[ServiceProxy, int]] = {}
        self._announcer = Announcer(self._cluster, console, self._folder.path / "keys")
        self._said: set[str] = set()

    # --- from outside ---------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends the run: in order at first, at once the second time."""
        if self._stop.is_set():
            self._executor.kill()
            return
        self._console.say("stopping; once more ends everything at once")
        self._stop.set()

    async def run(self) -> None:
        """Runs until ``stop``.

        Raises:
            DocumentError: The files are not fit to be run.
            ConfigError: The data folder or a port cannot be used.
        """
        documents = self._files.read()
        self._folder.lock()
        try:
            self._load()
            self._set_up()
            try:
                await self._start(documents)
                await self._run_until_stopped()
            finally:
                await self._shut_down()
        finally:
            self._folder.unlock()

    # --- begin ----------------------------------------------------------------------------------

    def _load(self) -> None:
        try:
            state = load_state(self._folder.state)
        except StateError as error:
            raise ConfigError(str(error)) from None
        if state is not None:
            self._cluster.load(state)

    def _set_up(self) -> None:
        data = self._folder.path
        folders = VolumeFolders(data, memory_folder(data))
        self._launcher = Launcher(self._cluster.get, folders, self._console.log)
        self._executor = Executor(self._cluster, self._launcher)
        self._claims = ClaimBinder(self._cluster, folders)
        self._jobs = JobController(self._cluster)
        self._deployments = DeploymentController(self._cluster)

    async def _start(self, documents: Sequence[Manifest]) -> None:
        self._console.detail(f"data in {self._folder.path}, logs in {self._folder.path / 'logs'}")
        await self._executor.adopt()
        # What an earlier run knew is told first, then everything that changes from now on.
        for manifest in self._cluster.dump()["items"]:
            self._changed(Change("ADDED", manifest["live"]))
        self._cluster.watch(self._changed)
        await self._apply(documents)
        # Statuses of an earlier run speak of processes that are gone: nothing is said before
        # everything has been looked at once.
        await self._deployments.sync()
        for key in self._router.known:
            await self._reconciler.reconcile(key)
        self._speaking = True
        for kind in CUSTOM_KINDS:
            for resource in await self._cluster.list(kind):
                self._console.conditions(resource)

    async def _apply(self, documents: Sequence[Manifest]) -> None:
        """Applies what the files say; raises before anything is changed when it cannot."""
        documents, routed = without_routers(documents)
        for name in routed:
            self._say_once(
                f"PersonalizedModel/{name}: spec.routing is left out; its router finds servers "
                "through an API server"
            )
        problems = []
        for document in documents:
            metadata = document["metadata"]
            live = await self._cluster.get(
                kind_of(document), metadata["namespace"], metadata["name"]
            )
            problem = moved_store(live, document)
            if problem:
                problems.append(problem)
        if problems:
            raise DocumentError(problems)
        await self._open_ports(documents)
        for manifest in documents:
            await self._cluster.apply(manifest, manager=MANAGER)
        await self._look_after_the_rest(documents)

    async def _open_ports(self, documents: Sequence[Manifest]) -> None:
        models = [item for item in documents if item["kind"] == PERSONALIZED_MODEL.kind]
        for model in models:
            key = (model["metadata"]["namespace"], model["metadata"]["name"])
            if key in self._proxies:
                continue
            wanted = self._settings.port + len(self._proxies) if self._settings.port else 0
            proxy = ServiceProxy(self._cluster, *key, partial(self._activators.port, key))
            try:
                self._proxies[key] = (proxy, await proxy.start(wanted))
            except OSError:
                raise ConfigError(
                    f"PersonalizedModel/{key[1]}: port {wanted} of 127.0.0.1 is taken; choose "
                    "another with --port"
                ) from None

    async def _look_after_the_rest(self, wanted: Sequence[Manifest]) -> None:
        """Objects of earlier files: deleted with ``--prune``, else kept and named once."""
        keys = {_identity(manifest) for manifest in wanted}
        for live in await self._cluster.applied_by(MANAGER):
            kind, namespace, name = identity = _identity(live)
            if identity in keys or live["metadata"].get("deletionTimestamp"):
                continue
            if self._settings.prune:
                await self._cluster.delete(kind_of(live), namespace, name, live["metadata"]["uid"])
            else:
                self._say_once(
                    f"{kind}/{name} is in no file any more; it stays (--prune deletes it)"
                )

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._console.say(text)

    # --- run ------------------------------------------------------------------------------------

    async def _run_until_stopped(self) -> None:
        workers = [asyncio.create_task(self._reconciler.work()) for _ in range(WORKERS)]
        tasks = [
            *workers,
            asyncio.create_task(self._control()),
            asyncio.create_task(self._follow_files()),
        ]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
        finally:
            self._queue.close()
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)

    async def _control(self) -> None:
        """Controllers, executor and state file, after every change and at least once a second."""
        while True:
            self._dirty.clear()
            await self._jobs.sync()
            await self._deployments.sync()
            await self._claims.sync()
            await self._activators.sync()
            await self._executor.sync()
            ports = {key: port for key, (_, port) in self._proxies.items()}
            await self._announcer.sync(ports)
            self._save()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._dirty.wait()
            await asyncio.sleep(QUIET_SECONDS)

    async def _follow_files(self) -> None:
        seen = self._files.signature()
        while True:
            await asyncio.sleep(FILE_SECONDS)
            now = self._files.signature()
            if now == seen:
                continue
            seen = now
            try:
                await self._apply(self._files.read())
                self._console.say("the files have changed and are applied")
            except (DocumentError, ConfigError) as error:
                self._console.say("the files have changed and cannot be applied:")
                for line in str(error).splitlines():
                    self._console.plain(f"  {line}")

    def _changed(self, change: Change) -> None:
        """Every change of every object."""
        self._unsaved = True
        self._dirty.set()
        manifest = change.object
        try:
            kind = kind_of(manifest)
        except KeyError:
            return
        if kind != SECRET:
            self._router.event(kind, change.type, manifest)
        if kind in CUSTOM_KINDS and change.type == "DELETED":
            self._console.gone(manifest)
        elif kind in CUSTOM_KINDS and self._speaking:
            self._console.conditions(manifest)
        if kind in (CONFIG_MAP, SECRET, CLAIM):
            # It may be named in a spec: cheap enough to look at all resources of the namespace.
            for key in self._router.known:
                if key[1] == manifest["metadata"].get("namespace"):
                    self._queue.add(key)

    def _save(self) -> None:
        if self._unsaved:
            self._unsaved = False
            save_state(self._folder.state, self._cluster.dump())

    # --- end ------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        for proxy, _ in self._proxies.values():
            await proxy.close()
        await self._activators.close()
        await self._executor.stop()
        for proxy, _ in self._proxies.values():
            await proxy.abort()
        self._launcher.close()
        self._unsaved = True
        self._save()
        self._console.detail("stopped; the same command goes on from here")


def _identity(manifest: Manifest) -> tuple[str, str, str]:
    metadata = manifest["metadata"]
    return (manifest["kind"], metadata.get("namespace", ""), metadata["name"])
