"""What a reconcile looks at: the resource, its children, what it names, pods, reports."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from inferscale_operator.cluster.base import Cluster
from inferscale_operator.cluster.cache import ChildCache, OwnerKey
from inferscale_operator.cluster.errors import InvalidError
from inferscale_operator.desired.kinds import (
    CHILD_KINDS,
    CLAIM,
    CONFIG_MAP,
    CUSTOM_KINDS,
    DEPLOYMENT,
    JOB,
    MEMORY_STORE,
    NAMESPACE,
    PERSONALIZED_MODEL,
    POD,
    SECRET,
    Kind,
    Manifest,
)
from inferscale_operator.desired.naming import owner_labels
from inferscale_operator.handlers.figures import STATUS_PATH, Figures, LoadReport
from inferscale_operator.planner.plan import ChildKey, Observed
from inferscale_operator.planner.references import references
from inferscale_operator.planner.rollout import ready_replicas

STATUS_PORT = "status"
_MOST_REPORTS = 64
_REFERENCE_KINDS = {
    kind.kind: kind for kind in (SECRET, CONFIG_MAP, CLAIM, MEMORY_STORE, PERSONALIZED_MODEL)
}
OPTIONAL_KINDS = tuple(kind for kind in CHILD_KINDS if kind.optional)
UNWATCHED_KINDS = (SECRET,)
"""Children that are read one by one: watching Secrets would take the right to list all of them."""


def kind_named(name: str) -> Kind:
    """The custom kind with this name."""
    return next(kind for kind in CUSTOM_KINDS if kind.kind == name)


async def observe(
    cluster: Cluster,
    cache: ChildCache,
    resource: Manifest,
    now: datetime,
    figures: Figures,
    models: Iterable[str] = (),
) -> Observed:
    """Everything that a decision about a custom resource may depend on.

    Args:
        cluster: Where to read.
        cache: Its children.
        resource: The live custom resource.
        now: Time, UTC.
        figures: Asks pods and nodes.
        models: Names of the PersonalizedModels that use a MemoryStore.

    Raises:
        ClusterError: Something could not be read.
    """
    metadata = resource["metadata"]
    namespace = str(metadata["namespace"])
    key: OwnerKey = (str(resource["kind"]), namespace, str(metadata["name"]))
    await _read_unwatched(cluster, cache, resource)
    children = own_children(resource, cache.children(key))
    users = [(PERSONALIZED_MODEL.kind, name) for name in models]
    found, optional, pods, terminating, gpu_memory = await asyncio.gather(
        _references(cluster, namespace, [*references(resource), *users]),
        _optional_kinds(cluster),
        _pods(cluster, resource, children),
        _namespace_terminating(cluster, resource),
        figures.gpu_memory(resource),
    )
    from_encoders = await _reports(cluster, pods)
    from_servers, ages = await figures.reports(pods)
    load = await figures.loads(resource, pods) if is_scaled(resource) else LoadReport({})
    return Observed(
        now=now,
        children=children,
        references=found,
        pods=pods,
        reports=from_encoders | from_servers,
        report_ages=ages,
        loads=load.loads,
        load_history=load.history,
        held=load.held,
        gpu_memory_bytes=gpu_memory,
        optional_kinds=optional,
        namespace_terminating=terminating,
        entropy=secrets.token_urlsafe(32),
    )


def is_scaled(resource: Manifest) -> bool:
    """Whether a resource is a model whose size follows its load, or that sleeps."""
    scaling = (resource.get("spec") or {}).get("autoscaling") or {}
    return resource["kind"] == PERSONALIZED_MODEL.kind and (
        scaling.get("provider", "none") != "none" or scaling.get("scaleToZero") is not None
    )


def own_children(
    resource: Manifest, children: Mapping[ChildKey, Manifest]
) -> dict[ChildKey, Manifest]:
    """Children without those of a former resource of the same name, which are being collected."""
    uid = resource["metadata"]["uid"]
    return {
        key: child for key, child in children.items() if controller_uid(child) in (None, "", uid)
    }


def controller_uid(manifest: Manifest) -> str | None:
    """Uid of the controlling owner, or None."""
    for reference in manifest["metadata"].get("ownerReferences") or []:
        if reference.get("controller"):
            return str(reference.get("uid", ""))
    return None


async def _read_unwatched(cluster: Cluster, cache: ChildCache, resource: Manifest) -> None:
    """Brings the generated Secret in the cache up to date, for kinds of resources that have one."""
    if resource["kind"] != PERSONALIZED_MODEL.kind:
        return
    namespace, name = resource["metadata"]["namespace"], api_key_name(resource)
    live = await cluster.get(SECRET, namespace, name)
    if live is not None:
        cache.update(SECRET, live)
        return
    for (kind, child), manifest in cache.children(
        (resource["kind"], namespace, resource["metadata"]["name"])
    ).items():
        if kind == SECRET.kind and child == name:
            cache.remove(SECRET, namespace, name, manifest["metadata"]["uid"])


def api_key_name(resource: Manifest) -> str:
    """Name of the Secret that is made for a PersonalizedModel."""
    return f"{resource['metadata']['name']}-api-key"


async def _references(
    cluster: Cluster, namespace: str, keys: list[ChildKey]
) -> dict[ChildKey, Manifest]:
    values = await asyncio.gather(
        *(cluster.get(_REFERENCE_KINDS[kind], namespace, name) for kind, name in keys)
    )
    return {key: value for key, value in zip(keys, values, strict=True) if value is not None}


async def _optional_kinds(cluster: Cluster) -> frozenset[str]:
    known = [kind.kind for kind in OPTIONAL_KINDS if await cluster.knows(kind)]
    return frozenset(known)


async def _pods(
    cluster: Cluster, resource: Manifest, children: Mapping[ChildKey, Manifest]
) -> tuple[Manifest, ...]:
    if not any(in_progress(resource, child) or serves(child) for child in children.values()):
        return ()
    namespace = str(resource["metadata"]["namespace"])
    return tuple(await cluster.list(POD, namespace, owner_labels(resource)))


def in_progress(resource: Manifest, child: Manifest) -> bool:
    """Whether the pods of a child may tell something that the status does not hold yet."""
    if child["kind"] == JOB.kind:
        recorded = (resource.get("status") or {}).get("job") or {}
        ended = any(
            condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True"
            for condition in (child.get("status") or {}).get("conditions") or []
        )
        known = recorded.get("name") == child["metadata"]["name"] and recorded.get("finishedAt")
        return not (ended and known)
    return child["kind"] == DEPLOYMENT.kind and not _rolled_out(child)


def serves(child: Manifest) -> bool:
    """Whether a child has ready server pods, which tell figures."""
    return child["kind"] == DEPLOYMENT.kind and ready_replicas(child) > 0


def _rolled_out(deployment: Manifest) -> bool:
    status: dict[str, Any] = deployment.get("status") or {}
    wanted = (deployment.get("spec") or {}).get("replicas", 1)
    return bool(
        status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
        and status.get("updatedReplicas", 0) == wanted
        and status.get("readyReplicas", 0) == wanted
        and status.get("replicas", 0) == wanted
    )


async def _reports(cluster: Cluster, pods: tuple[Manifest, ...]) -> dict[str, Mapping[str, object]]:
    running = [
        pod
        for pod in pods
        if (pod.get("status") or {}).get("phase") == "Running"
        and (pod["metadata"].get("labels") or {}).get("app.kubernetes.io/component") == "encoder"
    ][:_MOST_REPORTS]
    answers = await asyncio.gather(
        *(cluster.ask_pod(pod, STATUS_PORT, STATUS_PATH) for pod in running)
    )
    return {
        str(pod["metadata"]["name"]): answer
        for pod, answer in zip(running, answers, strict=True)
        if answer is not None
    }


async def _namespace_terminating(cluster: Cluster, resource: Manifest) -> bool:
    if not resource["metadata"].get("deletionTimestamp"):
        return False
    try:
        namespace = await cluster.get(NAMESPACE, None, resource["metadata"]["namespace"])
    except InvalidError:
        # Without the right to read it, the deletion takes the ordinary way.
        return False
    return namespace is None or (namespace.get("status") or {}).get("phase") == "Terminating"
