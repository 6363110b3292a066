"""What to do about a PersonalizedModel: wait for its stores, roll out, say what is so."""

from __future__ import annotations

from dataclasses import replace

from pydantic import ValidationError

from inferscale_operator.api.base import GROUP
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    SECRET,
    SERVICE,
    Manifest,
    kind_of,
)
from inferscale_operator.desired.naming import GENERATION
from inferscale_operator.desired.quantities import format_bytes
from inferscale_operator.desired.router import build_router
from inferscale_operator.desired.server import (
    build_activator,
    build_api_key_secret,
    build_disruption_budget,
    build_generation,
    build_server_base,
    build_servers_service,
    build_service,
    server_generation,
)
from inferscale_operator.desired.stores import StoreView
from inferscale_operator.planner.autoscaling import (
    autoscaler_kind,
    decide_autoscaling,
    observe_sleep,
    size_of_servers,
    without_servers,
)
from inferscale_operator.planner.canary import (
    canary_status,
    degraded_draft,
    live_canary,
    worst_canaries,
)
from inferscale_operator.planner.compatibility import check_stores, count_facts
from inferscale_operator.planner.conditions import (
    Draft,
    merge_conditions,
    summarise,
    transition_events,
)
from inferscale_operator.planner.drift import differs
from inferscale_operator.planner.gpu_budget import decide_gpu
from inferscale_operator.planner.invalid import plan_invalid
from inferscale_operator.planner.pending import model_pending
from inferscale_operator.planner.plan import Defaults, Observed, Plan, Ref, earliest
from inferscale_operator.planner.pods import first_trouble
from inferscale_operator.planner.requirements import first_missing, server_requirements
from inferscale_operator.planner.rollout import (
    Rollout,
    config_maps,
    decide_rollout,
    is_complete,
    ready_replicas,
    summary,
)
from inferscale_operator.planner.routing import Routers, decide_routers, is_router, router_drafts
from inferscale_operator.planner.tiers import decide_tiers, ready_pods
from inferscale_runtime.budget import ConfigError

LOOK_SECONDS = 15.0
"""How often a rollout is looked at without an event, for the troubles of its pods."""


def plan(resource: Manifest, observed: Observed, defaults: Defaults) -> Plan:
    """Decides the next step for one PersonalizedModel.

    Args:
        resource: The live object.
        observed: What was seen; references hold its MemoryStores.
        defaults: How the operator was installed.

    Returns:
        What to do now. Carrying it out and planning again comes to rest.
    """
    if resource["metadata"].get("deletionTimestamp"):
        return Plan()  # children go with their owner
    try:
        spec = PersonalizedModelSpec.model_validate(resource.get("spec", {}))
        return _Decision(resource, spec, observed, defaults).plan()
    except (ValidationError, ConfigError) as error:
        return plan_invalid(resource, observed, error)


class _Decision:
    """One decision; holds what its steps share."""

    def __init__(
        self,
        resource: Manifest,
        spec: PersonalizedModelSpec,
        observed: Observed,
        defaults: Defaults,
    ) -> None:
        self.resource = resource
        self.spec = spec
        self.observed = observed
        self.defaults = defaults
        self.name: str = resource["metadata"]["name"]
        alive = [
            item
            for item in observed.of_kind(DEPLOYMENT)
            if GENERATION in item["metadata"]["labels"]
            and not item["metadata"].get("deletionTimestamp")
        ]
        named = [(item["metadata"]["labels"][GENERATION], item) for item in alive]
        self.generations = {name: item for name, item in named if not is_router(item)}
        self.routers = {name: item for name, item in named if is_router(item)}
        service = observed.children.get((SERVICE.kind, self.name), {})
        selector = service.get("spec", {}).get("selector") or {}
        self.selector: Manifest = selector
        self.wants_router = spec.routing.provider != "none"
        # A Service that someone bent or deleted: the status still says which one served.
        recorded = resource.get("status", {}).get("serving") or {}
        marked = service.get("metadata", {}).get("labels", {}).get(GENERATION)
        self.selected: str | None = selector.get(GENERATION) or marked or recorded.get("hash")
        self.sleep = observe_sleep(resource, spec, observed, defaults)
        memory = resource.get("status", {}).get("budget") or {}
        self.gpu = decide_gpu(spec, observed, memory)

    def plan(self) -> Plan:
        stores = check_stores(self.spec, self.observed, self.gpu.draft)
        blocked = self._blocked()
        create = self._api_key()
        target = None
        if stores.usable and blocked is None and not create:
            target = server_generation(self.spec, stores.views)
        rollout = decide_rollout(self.selected, target, self.generations)
        if stores.gone:
            # What was deleted must not be served any longer, not even from memory.
            rollout = Rollout(None, None, tuple(sorted(self.generations)))
        scaling = decide_autoscaling(
            self.resource,
            self.spec,
            self.observed,
            self.sleep,
            rollout.serving,
            self.generations,
        )
        apply = build_server_base(
            self.resource,
            self.spec,
            self.defaults,
            self.observed.optional_kinds,
            (scaling.status or {}).get("metricNames"),
        )
        routers = self._routers(rollout, stores.gone)
        if target is not None:
            apply += self._generation(target, stores.views)
            apply += build_router(self.resource, self.spec, self.defaults, target)
        apply += self._services(rollout, routed=routers.routed)
        tiers = decide_tiers(
            self.resource,
            self.spec,
            self.observed,
            rollout.serving,
            self.generations.get(rollout.serving or ""),
        )
        apply += tiers.apply
        remove = [self.generations[name] for name in rollout.remove if name not in routers.held]
        remove += routers.remove
        needed = [*stores.drafts, *self._serving(rollout, target, blocked, apply)]
        canary = self._canary(rollout.serving)
        degraded = degraded_draft(canary)
        routing = router_drafts(routers, self.observed.pods, wanted=self.wants_router)
        drafts = [*needed, *scaling.drafts, *routing, *tiers.drafts]
        drafts += [degraded] if degraded else []
        drafts.append(summarise(needed, "Serving", f"generation {target} serves"))
        old = self.resource.get("status", {})
        return Plan(
            create=create,
            apply=tuple(apply),
            delete=(*map(_ref, remove), *self._orphans(apply, remove)),
            pod_costs=scaling.pod_costs,
            status=self._status(rollout, drafts, tiers.status, scaling.status)
            | ({"canary": canary} if canary else {}),
            replicas=scaling.replicas,
            events=(
                *transition_events(old.get("conditions", []), drafts),
                *tiers.events,
                *scaling.events,
            ),
            requeue_seconds=earliest(
                None if drafts[-1].status is True else LOOK_SECONDS,
                tiers.requeue_seconds,
                scaling.requeue_seconds,
            ),
        )

    def _canary(self, serving: str | None) -> list[Manifest]:
        """``status.canary``: the worst figures of the pods that serve."""
        pods = ready_pods(self.observed.pods, serving) if serving else []
        reports = [self.observed.reports.get(pod["metadata"]["name"], {}) for pod in pods]
        names = [store.name for store in self.spec.memory_stores]
        return canary_status(live_canary(self.resource), worst_canaries(reports), names)

    def _routers(self, rollout: Rollout, gone: bool) -> Routers:
        routers = decide_routers(
            rollout,
            self.routers,
            self.observed.pods,
            self.selector,
            wanted=self.wants_router,
        )
        # What was deleted must not be served any longer, whoever still holds a connection.
        return replace(routers, held=frozenset()) if gone else routers

    def _blocked(self) -> Draft | None:
        missing = first_missing(server_requirements(self.spec), self.observed)
        return (
            Draft("ServerAvailable", False, missing[0], missing[1], warning=True)
            if missing
            else None
        )

    def _api_key(self) -> tuple[Manifest, ...]:
        """A Secret to make first."""
        name = f"{self.name}-api-key"
        if self._api_key_secret() != name or self.spec.auth.secret_ref is not None:
            return ()
        if (SECRET.kind, name) in self.observed.children:
            return ()
        return (build_api_key_secret(self.resource, self.observed.entropy),)

    def _api_key_secret(self) -> str | None:
        auth = self.spec.auth
        if auth.mode != "apiKey" or auth.keys_secret_ref is not None:
            return None
        return auth.secret_ref.name if auth.secret_ref is not None else f"{self.name}-api-key"

    def _generation(self, target: str, stores: tuple[StoreView, ...]) -> list[Manifest]:
        spec = size_of_servers(self.spec, self.sleep, self.generations.get(target))
        return build_generation(
            self.resource,
            spec,
            stores,
            self.defaults,
            target,
            self._api_key_secret(),
            self.gpu.share,
        )

    def _services(self, rollout: Rollout, *, routed: bool) -> list[Manifest]:
        """How servers are reached: Services, activator, and what keeps servers while they serve."""
        found: list[Manifest] = []
        zero = self.spec.autoscaling.scale_to_zero
        if zero is not None:
            secret = self._api_key_secret()
            found += build_activator(self.resource, self.spec, zero, self.defaults, secret)
        if rollout.serving is None:
            return found
        ready = ready_replicas(self.generations.get(rollout.serving))
        asleep = self.sleep.asleep(self.spec.serving.replicas, ready)
        found.append(build_service(self.resource, rollout.serving, routed=routed, asleep=asleep))
        if zero is not None:
            found.append(build_servers_service(self.resource, rollout.serving))
        budget = build_disruption_budget(self.resource, self.spec, rollout.serving)
        return [*found, *([budget] if budget is not None else [])]

    def _serving(
        self, rollout: Rollout, target: str | None, blocked: Draft | None, apply: list[Manifest]
    ) -> list[Draft]:
        """``ServerAvailable`` and ``RolledOut``."""
        serving = self.generations.get(rollout.serving or "")
        ready = ready_replicas(serving)
        if self.spec.serving.replicas == 0 and serving is not None:
            available = without_servers(self.sleep)
        elif ready:
            available = Draft("ServerAvailable", True, "PodsReady")
        else:
            available = blocked or self._why_not(rollout.serving, "NoReadyPod", "no pod is ready")
        if target is None:
            if serving is None:
                return [available]
            message = "the generation in use stays until its successor can be made"
            if blocked is not None:
                return [available, replace(blocked, type="RolledOut")]
            return [available, Draft("RolledOut", False, "Waiting", message)]
        live = self.generations.get(target)
        moved = rollout.serving == target == self.selected and len(self.generations) == 1
        if (
            moved
            and live is not None
            and is_complete(live)
            and not self._to_be_applied(live, apply)
        ):
            return [available, Draft("RolledOut", True, "Complete")]
        pending = self._why_not(target, "RollingOut", f"generation {target} comes up")
        return [
            available,
            Draft("RolledOut", False, pending.reason, pending.message, pending.warning),
        ]

    @staticmethod
    def _to_be_applied(live: Manifest, apply: list[Manifest]) -> bool:
        """Whether the live Deployment is not yet what the present spec wants."""
        return any(
            item["kind"] == DEPLOYMENT.kind and differs(item, live)
            for item in apply
            if item["metadata"]["name"] == live["metadata"]["name"]
        )

    def _why_not(self, generation: str | None, reason: str, message: str) -> Draft:
        pods = [
            pod
            for pod in self.observed.pods
            if _generation_of(pod) == generation and not is_router(pod)
        ]
        found = first_trouble(pods)
        if found is None:
            return Draft("ServerAvailable", False, reason, message)
        image = f"spec.serving.image '{found.image}': " if found.image else ""
        text = f"{image}{found.message}; mend spec.serving or the cluster"
        return Draft("ServerAvailable", False, found.reason, text, warning=True)

    def _status(
        self,
        rollout: Rollout,
        drafts: list[Draft],
        placement: Manifest | None,
        autoscaling: Manifest | None,
    ) -> Manifest:
        old = self.resource.get("status", {})
        metadata = self.resource["metadata"]
        generation = metadata.get("generation", 0)
        serving = self.generations.get(rollout.serving or "")
        status: Manifest = {
            "observedGeneration": generation,
            "conditions": merge_conditions(
                old.get("conditions", []), drafts, generation, self.observed.now
            ),
            "replicas": int((serving or {}).get("status", {}).get("replicas", 0) or 0),
            "readyReplicas": ready_replicas(serving),
            "selector": f"{GROUP}/owner-kind=PersonalizedModel,{GROUP}/owner={self.name}",
            "facts": count_facts(self.spec, self.observed),
            "endpoint": f"http://{self.name}.{metadata['namespace']}.svc",
            "tier": self._tiers(),
        }
        if serving is not None:
            status["serving"] = summary(rollout.serving, serving)
        coming = self.generations.get(rollout.coming or "")
        if coming is not None:
            status["next"] = summary(rollout.coming, coming)
        if autoscaling is not None:
            status["autoscaling"] = autoscaling
        pending = model_pending(self.spec, self.observed, old.get("pendingFacts") or [])
        if pending:
            status["pendingFacts"] = pending
        if placement is not None:
            status["placement"] = placement
        if self.gpu.status is not None:
            status["budget"] = self.gpu.status
        return status

    def _tiers(self) -> str:
        arena = self.gpu.share.arena_bytes
        return f"{f'gpu {format_bytes(arena)}, ' if arena else ''}dram {self.spec.tiers.dram}"

    def _orphans(self, apply: list[Manifest], removed: list[Manifest]) -> list[Ref]:
        """Children that nothing needs any more."""
        keep = {(item["kind"], item["metadata"]["name"]) for item in apply}
        keep.add((SECRET.kind, self._api_key_secret() or ""))
        gone = {item["metadata"]["name"] for item in removed}
        for item in self.generations.values():
            if item["metadata"]["name"] not in gone:
                keep.add((DEPLOYMENT.kind, item["metadata"]["name"]))
                keep |= {(CONFIG_MAP.kind, name) for name in config_maps(item)}
        if not self.generations or not any(i["kind"] == SERVICE.kind for i in apply):
            keep.add((SERVICE.kind, self.name))
        found = []
        for (kind, name), live in sorted(self.observed.children.items()):
            if (kind, name) in keep or live["metadata"].get("deletionTimestamp"):
                continue
            if kind == DEPLOYMENT.kind and GENERATION in live["metadata"].get("labels", {}):
                continue  # the rollout decides
            if kind == autoscaler_kind(self.spec):
                continue  # it waits for the names of metrics
            found.append(_ref(live))
        return found


def _generation_of(item: Manifest) -> str | None:
    value = item["metadata"].get("labels", {}).get(GENERATION)
    return str(value) if value is not None else None


def _ref(live: Manifest) -> Ref:
    return Ref(kind_of(live), live["metadata"]["name"], live["metadata"]["uid"])
