"""Activators of ``inferscale up``: in this process, because there is no API server to ask.

They are the same as a cluster's, but that a server is found among the pods of the cluster in
memory, and that the size is written there.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from inferscale_operator.activator.admission import Admission
from inferscale_operator.activator.application import Activator
from inferscale_operator.activator.command import listen
from inferscale_operator.activator.metrics import ActivatorMetrics
from inferscale_operator.activator.permission import MayWake, any_token, everybody, one_key
from inferscale_operator.activator.servers import Servers, WakeError
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.cluster.base import Cluster
from inferscale_operator.cluster.errors import ClusterError, ConflictError
from inferscale_operator.desired.kinds import PERSONALIZED_MODEL, POD, SECRET, SERVICE, Manifest
from inferscale_operator.desired.secret import API_KEY, api_key_secret_name
from inferscale_operator.desired.selection import servers_service_name
from inferscale_operator.local.service_proxy import LOOPBACK, backends

DRAIN_SECONDS = 5.0
"""How long requests may end when ``up`` stops: their servers end too."""

Place = tuple[str, str]
"""Namespace and name of a model."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    max_held: int
    max_wait: float
    replicas: int
    guarded: bool
    api_key: str | None

    @property
    def may_wake(self) -> MayWake:
        """Who may."""
        if self.api_key is not None:
            return one_key(lambda: self.api_key)
        return any_token if self.guarded else everybody


@dataclass(frozen=True, slots=True)
class _Running:
    settings: _Wanted
    admission: Admission
    runner: web.AppRunner
    port: int


class LocalActivators:
    """One activator for each model that scales to zero.

    Args:
        cluster: Models, Services, pods and Secrets with their values.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._running: dict[Place, _Running] = {}

    def port(self, place: Place) -> int | None:
        """The port of a model's activator, or None."""
        found = self._running.get(place)
        return found.port if found else None

    def held(self, resource: Manifest) -> int:
        """Requests that wait for a model."""
        metadata = resource["metadata"]
        found = self._running.get((metadata["namespace"], metadata["name"]))
        return found.admission.held if found else 0

    async def sync(self) -> None:
        """Starts and ends activators as the models ask for it."""
        wanted: dict[Place, _Wanted] = {}
        for model in await self._cluster.list(PERSONALIZED_MODEL):
            settings = await self._settings(model)
            if settings is not None:
                wanted[model["metadata"]["namespace"], model["metadata"]["name"]] = settings
        for place, running in list(self._running.items()):
            if wanted.get(place) != running.settings:
                await self._running.pop(place).runner.cleanup()
        for place, settings in wanted.items():
            if place not in self._running:
                self._running[place] = await self._start(place, settings)

    async def close(self) -> None:
        """Ends all."""
        while self._running:
            _, running = self._running.popitem()
            await running.runner.cleanup()

    async def _settings(self, model: Manifest) -> _Wanted | None:
        """What a model asks for; None without scaling to zero, or while its key is missing."""
        try:
            spec = PersonalizedModelSpec.model_validate(model["spec"])
        except ValidationError:
            return None
        scaling, key = spec.autoscaling, None
        if scaling.scale_to_zero is None:
            return None
        auth = spec.auth
        if auth.mode == "apiKey" and auth.keys_secret_ref is None:
            ref = auth.secret_ref
            name = ref.name if ref is not None else api_key_secret_name(model)
            secret = await self._cluster.get(SECRET, model["metadata"]["namespace"], name)
            value = ((secret or {}).get("data") or {}).get(API_KEY)
            if not value:
                return None
            key = base64.b64decode(value).decode()
        zero = scaling.scale_to_zero
        return _Wanted(
            zero.max_held_requests,
            float(zero.max_wait_seconds),
            scaling.awake_minimum,
            auth.mode != "none",
            key,
        )

    async def _start(self, place: Place, settings: _Wanted) -> _Running:
        metrics = ActivatorMetrics(CollectorRegistry())
        admission = Admission(settings.max_held)
        replicas = settings.replicas
        activator = Activator(
            place[1],
            Servers(lambda: self._find(place), lambda: self._wake(place, replicas), metrics),
            admission,
            metrics,
            settings.max_wait,
            settings.may_wake,
        )
        runner = await listen(activator, LOOPBACK, 0, DRAIN_SECONDS)
        return _Running(settings, admission, runner, int(runner.addresses[0][1]))

    async def _find(self, place: Place) -> str | None:
        namespace, name = place
        owner = {"metadata": {"name": name}}
        service = await self._cluster.get(SERVICE, namespace, servers_service_name(owner))
        if service is None:
            return None
        ports = backends(service, await self._cluster.list(POD, namespace))
        return f"http://{LOOPBACK}:{ports[0]}" if ports else None

    async def _wake(self, place: Place, replicas: int) -> None:
        try:
            live = await self._cluster.get(PERSONALIZED_MODEL, *place)
            if live is not None and (live["spec"].get("serving") or {}).get("replicas") == 0:
                await self._cluster.scale(live, replicas)
        except ConflictError:
            return
        except ClusterError as error:
            raise WakeError(str(error)) from error
