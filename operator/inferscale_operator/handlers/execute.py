"""Carries a plan out: only what differs from the live objects is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from inferscale_operator.cluster.base import Cluster
from inferscale_operator.cluster.cache import ChildCache, owner_of
from inferscale_operator.cluster.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    OwnedByOtherError,
)
from inferscale_operator.desired.kinds import CHILD_KINDS, Kind, Manifest, kind_of
from inferscale_operator.desired.naming import FINALIZER
from inferscale_operator.handlers.observe import controller_uid
from inferscale_operator.planner.drift import differs
from inferscale_operator.planner.plan import Observed, Plan, Ref

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Of the pods of a Deployment that gets smaller, those with the least go first."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What carrying a plan out did.

    Attributes:
        resource: The custom resource in its newest version.
        children_changed: Whether a child or the finalizer was written.
        status_changed: Whether the status was written.
        actions: One line for each write, for the log.
    """

    resource: Manifest
    children_changed: bool = False
    status_changed: bool = False
    actions: list[str] = field(default_factory=list)


class Executor:
    """Writes what a plan says, for one custom resource.

    Args:
        cluster: Where to write.
        cache: Takes the written objects in.
        resource: The custom resource as it was observed.
        observed: What the plan was made from.
        on_own_write: Told of each new version of the custom resource.
    """

    def __init__(
        self,
        cluster: Cluster,
        cache: ChildCache,
        resource: Manifest,
        observed: Observed,
        on_own_write: Callable[[Manifest], None] = lambda _: None,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._observed = observed
        self._on_own_write = on_own_write
        self.outcome = Outcome(resource)

    async def execute(self, plan: Plan) -> Outcome:
        """Carries everything out, in the order of the plan's fields; children by kind.

        Raises:
            ClusterError: A step failed; what was done before stays and shows in ``outcome``.
        """
        if plan.finalizer is not None:
            await self._finalizer(present=plan.finalizer)
        steps = [(item, self._create) for item in plan.create]
        steps += [(item, self._apply) for item in plan.apply]
        # What pods need is there before the pods: accounts, policies and claims before Jobs.
        for manifest, write in sorted(steps, key=lambda step: _order(step[0])):
            await write(manifest)
        for ref in plan.delete:
            await self._delete(ref)
        await self._mark_pods(plan.pod_costs)
        if plan.status is not None:
            await self.write_status(plan.status)
        if plan.replicas is not None:
            await self._cluster.scale(self.outcome.resource, plan.replicas)
            self._did(f"scaled to {plan.replicas}", self.outcome.resource)
        for event in plan.events:
            await self._cluster.post_event(self.outcome.resource, event)
        return self.outcome

    async def _mark_pods(self, costs: Mapping[str, int]) -> None:
        """Says which pods a smaller Deployment should lose first; a wish, so nothing fails."""
        for pod in self._observed.pods:
            name = str(pod["metadata"]["name"])
            cost = str(costs.get(name))
            old = (pod["metadata"].get("annotations") or {}).get(DELETION_COST, "0")
            if name not in costs or old == cost:
                continue
            try:
                await self._cluster.annotate(pod, DELETION_COST, cost)
            except (InvalidError, ConflictError) as error:
                _log.debug("pod %s is not marked: %s", name, error.reason)

    async def write_status(self, status: Manifest) -> None:
        """Replaces the status of the custom resource, if it differs."""
        live = self.outcome.resource
        if _gone(live) or not _status_differs(status, live.get("status") or {}):
            return
        self._own(await self._cluster.patch_status(live, status))
        self.outcome.status_changed = True

    async def _finalizer(self, *, present: bool) -> None:
        live = self.outcome.resource
        if (FINALIZER in (live["metadata"].get("finalizers") or [])) == present:
            return
        if present and live["metadata"].get("deletionTimestamp"):
            return
        self._own(await self._cluster.set_finalizer(live, FINALIZER, present=present))
        self._did("finalizer added" if present else "finalizer removed", live)

    async def _create(self, manifest: Manifest) -> None:
        kind, name = kind_of(manifest), str(manifest["metadata"]["name"])
        if (kind.kind, name) in self._observed.children:
            return
        try:
            made = await self._cluster.create(manifest)
        except AlreadyExistsError:
            # An earlier try may have made it and not heard the answer.
            live = await self._cluster.get(kind, manifest["metadata"]["namespace"], name)
            if live is None:
                raise ConflictError(f"{kind.kind} '{name}' came and went") from None
            self._check_ours(manifest, live)
            self._cache.update(kind, live)
            self.outcome.children_changed = True
            return
        self._cache.update(kind, made)
        self._did("created", made)

    async def _apply(self, manifest: Manifest) -> None:
        kind, name = kind_of(manifest), str(manifest["metadata"]["name"])
        namespace = str(manifest["metadata"]["namespace"])
        live = self._observed.children.get((kind.kind, name))
        if live is None:
            live = await self._cluster.get(kind, namespace, name)
            if live is not None:
                self._check_ours(manifest, live)
        else:
            self._check_ours(manifest, live)
        if live is not None and not differs(manifest, live):
            self._cache.update(kind, live)
            return
        applied = await self._cluster.apply(manifest)
        self._cache.update(kind, applied)
        self._did("created" if live is None else "repaired", applied)

    async def _delete(self, ref: Ref) -> None:
        namespace = str(self.outcome.resource["metadata"]["namespace"])
        await self._cluster.delete(ref.kind, namespace, ref.name, ref.uid)
        # Asked at once, because a second delete before the watch tells of it would be a write.
        live = await self._cluster.get(ref.kind, namespace, ref.name)
        if live is None or live["metadata"].get("uid") != ref.uid:
            self._cache.remove(ref.kind, namespace, ref.name, ref.uid)
        else:
            self._cache.update(ref.kind, live)
        self._log("deleted", ref.kind, namespace, ref.name)

    def _check_ours(self, desired: Manifest, live: Manifest) -> None:
        """Raises unless the live object may be written."""
        name, kind = desired["metadata"]["name"], desired["kind"]
        ours, theirs = controller_uid(desired), controller_uid(live)
        if theirs is not None and theirs == ours:
            return
        if owner_of(live) == owner_of(desired):
            if theirs is None:
                return
            if _same_controller(desired, live):
                raise ConflictError(
                    f"{kind} '{name}' of a former resource is still being collected"
                )
        controller = _controller(live)
        owner = (
            f"controlled by {controller['kind']} '{controller['name']}'"
            if controller
            else "not made by this operator for this resource"
        )
        raise OwnedByOtherError(
            f"{kind} '{name}' exists and is {owner}; rename or delete it, "
            "or give this resource another name"
        )

    def _own(self, live: Manifest) -> None:
        self.outcome.resource = live
        self._on_own_write(live)

    def _did(self, action: str, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        self._log(action, kind_of(manifest), str(metadata["namespace"]), str(metadata["name"]))

    def _log(self, action: str, kind: Kind, namespace: str, name: str) -> None:
        self.outcome.children_changed = True
        self.outcome.actions.append(f"{action} {kind.kind}/{name}")
        _log.info(
            "%s %s %s/%s",
            action,
            kind.kind,
            namespace,
            name,
            extra={"action": action, "kind": kind.kind, "namespace": namespace, "object": name},
        )


def _order(manifest: Manifest) -> int:
    return CHILD_KINDS.index(kind_of(manifest))


def _gone(live: Manifest) -> bool:
    """Whether the object went away with its last finalizer."""
    metadata = live["metadata"]
    return bool(metadata.get("deletionTimestamp")) and not metadata.get("finalizers")


def _controller(manifest: Manifest) -> Manifest | None:
    for reference in manifest["metadata"].get("ownerReferences") or []:
        if reference.get("controller"):
            return dict(reference)
    return None


def _same_controller(desired: Manifest, live: Manifest) -> bool:
    ours, theirs = _controller(desired), _controller(live)
    return (
        ours is not None
        and theirs is not None
        and (ours["kind"], ours["name"]) == (theirs["kind"], theirs["name"])
    )


def _status_differs(wanted: Manifest, live: Manifest) -> bool:
    """Nulls count as absent: the API server drops them."""
    return _without_nulls(wanted) != _without_nulls(live)


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
