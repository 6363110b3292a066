"""``inferscale up``: the operator's own planners and builders over a cluster in memory.

One event loop holds everything: the reconcilers, the controllers, the executor and the proxies.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from inferscale_operator.handlers.events import Router
from inferscale_operator.handlers.hearing import Hearing
from inferscale_operator.handlers.queue import WorkQueue
from inferscale_operator.handlers.reconciler import Reconciler
from inferscale_operator.local.console import ANY_USER, Console, curl_line, readiness_note, user_of
from inferscale_operator.local.controllers import ClaimBinder, DeploymentController, JobController
from inferscale_operator.local.data_folder import DataFolder
from inferscale_operator.local.documents import DocumentError, existing_claims, moved_store
from inferscale_operator.local.documents import read_documents as read_texts
from inferscale_operator.local.executor import Executor
from inferscale_operator.local.launch import Launcher
from inferscale_operator.local.memory_cluster import Change, MemoryCluster
from inferscale_operator.local.pod_status import PORTS_ANNOTATION
from inferscale_operator.local.probes import http_get
from inferscale_operator.local.service_proxy import ServiceProxy
from inferscale_operator.local.state_file import StateError, load_state, save_state
from inferscale_operator.local.volumes import FOLDER_ANNOTATION, VolumeFolders, memory_folder
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


async def ask_local_pod(pod: Manifest, port: str, path: str) -> Mapping[str, object] | None:
    """GET of a JSON object from a pod of this machine."""
    text = (pod["metadata"].get("annotations") or {}).get(PORTS_ANNOTATION)
    number = json.loads(text).get(port) if text else None
    if number is None:
        return None
    status, body = await http_get(number, path, _ASK_SECONDS)
    if status != 200:
        return None
    try:
        value = json.loads(body)
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
        self._cluster = MemoryCluster(ask=ask_local_pod)
        self._cache = ChildCache()
        self._queue = WorkQueue()
        self._router = Router(self._cache, self._queue, Hearing())
        defaults = Defaults(runtime_image=_IMAGE)
        self._reconciler = Reconciler(
            self._cluster,
            self._cache,
            self._queue,
            PLANS,
            defaults,
            _NoReports(),
            self._router.wrote,
        )
        self._stop = asyncio.Event()
        self._dirty = asyncio.Event()
        self._unsaved = False
        self._proxies: dict[tuple[str, str], tuple[ServiceProxy, int]] = {}
        self._announced: set[tuple[str, str]] = set()
        self._left_over: set[str] = set()

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
        documents = self._read()
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

    def _read(self) -> list[Manifest]:
        texts = {}
        for file in self._settings.files:
            try:
                texts[str(file)] = file.read_text()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not a text in UTF-8"
                raise DocumentError([f"{file}: {reason}; name a file with manifests"]) from None
        documents = read_texts(texts)
        claims = self._settings.volumes
        problems = [
            f"{document['kind']}/{document['metadata']['name']}: {path} '{name}': there is no such "
            f"claim on this machine; give it a folder with --volume {name}=FOLDER"
            for document in documents
            for path, name in existing_claims(document)
            if name not in claims
        ]
        if problems:
            raise DocumentError(problems)
        return documents

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

    async def _apply(self, documents: Sequence[Manifest]) -> None:
        """Applies what the files say; raises before anything is changed when it cannot."""
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
        namespaces = {document["metadata"]["namespace"] for document in documents}
        claims = [
            _claim(namespace, name, folder)
            for namespace in sorted(namespaces)
            for name, folder in self._settings.volumes.items()
        ]
        for manifest in (*claims, *documents):
            await self._cluster.apply(manifest, manager=MANAGER)
        await self._look_after_the_rest([*claims, *documents])

    async def _open_ports(self, documents: Sequence[Manifest]) -> None:
        models = [item for item in documents if item["kind"] == PERSONALIZED_MODEL.kind]
        for model in models:
            key = (model["metadata"]["namespace"], model["metadata"]["name"])
            if key in self._proxies:
                continue
            wanted = self._settings.port + len(self._proxies) if self._settings.port else 0
            proxy = ServiceProxy(self._cluster, *key)
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
            elif f"{kind}/{name}" not in self._left_over:
                self._left_over.add(f"{kind}/{name}")
                self._console.say(
                    f"{kind}/{name} is in no file any more; it stays (--prune deletes it)"
                )

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
            await self._executor.sync()
            await self._announce()
            self._save()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._dirty.wait()
            await asyncio.sleep(QUIET_SECONDS)

    async def _follow_files(self) -> None:
        seen = self._signature()
        while True:
            await asyncio.sleep(FILE_SECONDS)
            now = self._signature()
            if now == seen:
                continue
            seen = now
            try:
                await self._apply(self._read())
                self._console.say("the files have changed and are applied")
            except (DocumentError, ConfigError) as error:
                self._console.say("the files have changed and cannot be applied:")
                for line in str(error).splitlines():
                    self._console.plain(f"  {line}")

    def _signature(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for file in self._settings.files:
            try:
                stat = os.stat(file)
            except OSError:
                found.append(None)
            else:
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return found

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
        if kind in CUSTOM_KINDS:
            if change.type == "DELETED":
                self._console.gone(manifest)
            else:
                self._console.conditions(manifest)
        elif kind in (CONFIG_MAP, SECRET, CLAIM):
            # It may be named in a spec: cheap enough to look at all resources of the namespace.
            for key in self._router.known:
                if key[1] == manifest["metadata"].get("namespace"):
                    self._queue.add(key)

    async def _announce(self) -> None:
        """Says how to ask a model that has become ready."""
        for model in await self._cluster.list(PERSONALIZED_MODEL):
            key = (model["metadata"]["namespace"], model["metadata"]["name"])
            if not _is_ready(model) or key not in self._proxies:
                self._announced.discard(key)
            elif key not in self._announced:
                self._announced.add(key)
                await self._say_how_to_ask(model, self._proxies[key][1])

    async def _say_how_to_ask(self, model: Manifest, port: int) -> None:
        namespace, name = model["metadata"]["namespace"], model["metadata"]["name"]
        stores = [item["name"] for item in model["spec"]["memoryStores"]]
        user, store = None, None
        for candidate in stores:
            user = await self._user_of_store(namespace, candidate)
            if user is not None:
                store = candidate if len(stores) > 1 else None
                break
        key_file = await self._key_file(model)
        self._console.say(f"PersonalizedModel/{name} answers{readiness_note(user)}:")
        self._console.plain(
            curl_line(name, port, ANY_USER if user is None else user, store, key_file)
        )

    async def _user_of_store(self, namespace: str, name: str) -> str | None:
        store = await self._cluster.get(MEMORY_STORE, namespace, name)
        source = ((store or {}).get("spec") or {}).get("source", {}).get("configMap")
        if not source:
            return None
        live = await self._cluster.get(CONFIG_MAP, namespace, source["name"])
        return user_of(live, source.get("key"))

    async def _key_file(self, model: Manifest) -> str | None:
        """The API key in a file for the user alone, so that it need not be printed."""
        auth = model["spec"].get("auth") or {}
        if auth.get("mode") != "apiKey":
            return None
        namespace, name = model["metadata"]["namespace"], model["metadata"]["name"]
        secret = (auth.get("secretRef") or {}).get("name") or f"{name}-api-key"
        live = await self._cluster.get(SECRET, namespace, secret)
        value = ((live or {}).get("data") or {}).get("api-key", "")
        folder = self._folder.path / "keys" / namespace
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(base64.b64decode(value))
        return str(path)

    def _save(self) -> None:
        if self._unsaved:
            self._unsaved = False
            save_state(self._folder.state, self._cluster.dump())

    # --- end ------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        for proxy, _ in self._proxies.values():
            await proxy.close()
        await self._executor.stop()
        for proxy, _ in self._proxies.values():
            await proxy.abort()
        self._launcher.close()
        self._unsaved = True
        self._save()
        self._console.detail("stopped; the same command goes on from here")


def _claim(namespace: str, name: str, folder: Path) -> Manifest:
    return {
        "apiVersion": CLAIM.api_version,
        "kind": CLAIM.kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "annotations": {FOLDER_ANNOTATION: str(folder.absolute())},
        },
        "spec": {"accessModes": ["ReadWriteMany"], "volumeMode": "Filesystem"},
    }


def _identity(manifest: Manifest) -> tuple[str, str, str]:
    metadata = manifest["metadata"]
    return (manifest["kind"], metadata.get("namespace", ""), metadata["name"])


def _is_ready(resource: Manifest) -> bool:
    conditions: list[Any] = (resource.get("status") or {}).get("conditions") or []
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
