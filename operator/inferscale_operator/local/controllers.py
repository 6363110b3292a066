"""Controllers of Jobs, Deployments and claims: small loops over a ``Cluster``.

The Job controller and the claim binder also serve an API server that has none; the Deployment
controller is for the cluster in memory.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable
from datetime import UTC, datetime

from inferscale_operator.cluster.base import Cluster
from inferscale_operator.cluster.errors import AlreadyExistsError, ClusterError, ConflictError
from inferscale_operator.desired.kinds import CLAIM, DEPLOYMENT, JOB, POD, Kind, Manifest
from inferscale_operator.local.deployment_plan import build_pod, plan_deployment
from inferscale_operator.local.job_plan import plan_job
from inferscale_operator.local.volumes import FOLDER_ANNOTATION, VolumeFolders

logger = logging.getLogger(__name__)

Clock = Callable[[], datetime]


def _now() -> datetime:
    return datetime.now(UTC)


async def _owned_pods(
    cluster: Cluster, kind: Kind, namespace: str | None
) -> list[tuple[Manifest, list[Manifest]]]:
    """Objects of a kind with the pods that each of them controls."""
    # Owners first: a pod of an owner that is missed here is dealt with by the next look.
    owners = await cluster.list(kind, namespace)
    pods: dict[str, list[Manifest]] = {}
    if owners:
        for pod in await cluster.list(POD, namespace):
            for reference in pod["metadata"].get("ownerReferences") or []:
                if reference.get("controller"):
                    pods.setdefault(reference["uid"], []).append(pod)
    return [(owner, pods.get(owner["metadata"]["uid"], [])) for owner in owners]


async def _delete(cluster: Cluster, kind: Kind, manifest: Manifest) -> None:
    metadata = manifest["metadata"]
    await cluster.delete(kind, metadata["namespace"], metadata["name"], metadata["uid"])


async def _create(cluster: Cluster, pod: Manifest) -> None:
    try:
        await cluster.create(pod)
    except AlreadyExistsError:
        return


class JobController:
    """Runs Jobs.

    Args:
        cluster: Jobs and pods.
        namespace: Only this namespace; None for all.
        clock: Time, UTC.
    """

    def __init__(self, cluster: Cluster, namespace: str | None = None, clock: Clock = _now) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._clock = clock

    async def sync(self) -> None:
        """One look at all Jobs."""
        for job, pods in await _owned_pods(self._cluster, JOB, self._namespace):
            if job["metadata"].get("deletionTimestamp"):
                continue
            try:
                await self._sync_job(job, pods)
            except ConflictError:
                continue
            except ClusterError as error:
                logger.warning("job %s: %s", job["metadata"]["name"], error)

    async def _sync_job(self, job: Manifest, pods: list[Manifest]) -> None:
        plan = plan_job(job, pods, self._clock())
        if plan.delete_job:
            await _delete(self._cluster, JOB, job)
            return
        if plan.status != (job.get("status") or {}):
            await self._cluster.patch_status(job, plan.status)
        for pod in plan.delete:
            await _delete(self._cluster, POD, pod)
        for pod in plan.create:
            await _create(self._cluster, pod)


class DeploymentController:
    """Runs Deployments of the cluster in memory.

    Args:
        cluster: Deployments and pods.
        clock: Time, UTC.
        suffix: Gives the last part of each pod's name.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock = _now,
        suffix: Callable[[], str] = lambda: secrets.token_hex(3),
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._suffix = suffix

    async def sync(self) -> None:
        """One look at all Deployments."""
        for deployment, pods in await _owned_pods(self._cluster, DEPLOYMENT, None):
            if deployment["metadata"].get("deletionTimestamp"):
                continue
            plan = plan_deployment(deployment, pods, self._clock())
            for pod in plan.delete:
                await _delete(self._cluster, POD, pod)
            for _ in range(plan.create):
                await _create(self._cluster, build_pod(deployment, self._suffix()))
            if plan.status != (deployment.get("status") or {}):
                try:
                    await self._cluster.patch_status(deployment, plan.status)
                except ConflictError:
                    continue


class ClaimBinder:
    """Binds claims to folders, and removes the folder of a claim that was deleted.

    Only folders of claims that this object has seen are removed, so that lost state is not taken
    for deleted claims. A folder that was named by the user is never removed.

    Args:
        cluster: Claims and pods.
        folders: Where folders lie.
        namespace: Only this namespace; None for all.
    """

    def __init__(
        self, cluster: Cluster, folders: VolumeFolders, namespace: str | None = None
    ) -> None:
        self._cluster = cluster
        self._folders = folders
        self._namespace = namespace
        self._seen: dict[str, Manifest] = {}

    async def sync(self) -> None:
        """One look at all claims."""
        claims = await self._cluster.list(CLAIM, self._namespace)
        for claim in claims:
            self._seen[claim["metadata"]["uid"]] = claim
            if (claim.get("status") or {}).get("phase") != "Bound":
                await self._bind(claim)
        present = {claim["metadata"]["uid"] for claim in claims}
        gone = [claim for uid, claim in self._seen.items() if uid not in present]
        if gone:
            pods = await self._cluster.list(POD, self._namespace)
            for claim in gone:
                if not any(_uses(pod, claim) for pod in pods):
                    self._remove(claim, claims)

    async def _bind(self, claim: Manifest) -> None:
        self._folders.claim(claim).mkdir(parents=True, exist_ok=True)
        spec = claim.get("spec") or {}
        status = {
            "phase": "Bound",
            "accessModes": spec.get("accessModes") or [],
            "capacity": dict((spec.get("resources") or {}).get("requests") or {}),
        }
        try:
            await self._cluster.patch_status(claim, status)
        except ConflictError:
            return
        except ClusterError as error:
            logger.warning("claim %s: %s", claim["metadata"]["name"], error)

    def _remove(self, claim: Manifest, claims: list[Manifest]) -> None:
        del self._seen[claim["metadata"]["uid"]]
        folder = self._folders.claim(claim)
        taken = any(self._folders.claim(other) == folder for other in claims)
        named = FOLDER_ANNOTATION in (claim["metadata"].get("annotations") or {})
        if not taken and not named:
            shutil.rmtree(folder, ignore_errors=True)


def _uses(pod: Manifest, claim: Manifest) -> bool:
    if pod["metadata"]["namespace"] != claim["metadata"]["namespace"]:
        return False
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return False
    names = [
        (volume.get("persistentVolumeClaim") or {}).get("claimName")
        for volume in pod["spec"].get("volumes") or []
    ]
    return claim["metadata"]["name"] in names
