"""What a Job's controller does next: from (Job, its pods, time) to pods and status; pure.

Indexed Jobs as the Kubernetes Job controller runs them: one pod per index, backoffLimit,
podFailurePolicy, activeDeadlineSeconds, ttlSecondsAfterFinished. A Job that is not indexed is
treated as one whose pods do not look at their index. Not here: elastic sizes, suspension,
backoffLimitPerIndex, successPolicy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.desired.naming import digest

INDEX = "batch.kubernetes.io/job-completion-index"
JOB_NAME = "batch.kubernetes.io/job-name"
CONTROLLER_UID = "batch.kubernetes.io/controller-uid"
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"

FIRST_BACKOFF_SECONDS = 10.0
LONGEST_BACKOFF_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What to do now.

    Attributes:
        create: Pods to make.
        delete: Pods to delete.
        status: The whole status.
        delete_job: Whether the Job itself is to go.
    """

    create: tuple[Manifest, ...] = ()
    delete: tuple[Manifest, ...] = ()
    status: Manifest = field(default_factory=dict)
    delete_job: bool = False


def plan_job(job: Manifest, pods: Sequence[Manifest], now: datetime) -> JobPlan:
    """Decides.

    Args:
        job: The live Job.
        pods: All pods that it owns.
        now: Time, UTC.
    """
    spec, old = job["spec"], job.get("status") or {}
    ended = finished(job)
    if ended is not None:
        since = _parse(ended["lastTransitionTime"])
        ttl = spec.get("ttlSecondsAfterFinished")
        over = ttl is not None and (now - since).total_seconds() >= ttl
        return JobPlan(status=old, delete_job=over)
    state = _State(job, pods, now)
    status = state.status()
    failure = state.failure()
    if failure is not None:
        # The Job has failed when nothing of it runs any more.
        if not state.unfinished:
            status = _end(status, "Failed", *failure, now=now)
        return JobPlan(delete=tuple(state.active), status=status)
    if len(state.succeeded) >= state.completions:
        message = "Reached expected number of succeeded pods"
        status = _end(status, "Complete", "CompletionsReached", message, now=now)
        return JobPlan(status=status | {"completionTime": _format(now)})
    return JobPlan(create=tuple(state.missing()), status=status)


def finished(job: Manifest) -> Manifest | None:
    """The condition with which a Job ended, or None."""
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            found: Manifest = condition
            return found
    return None


class _State:
    """What the pods of a Job say together."""

    def __init__(self, job: Manifest, pods: Sequence[Manifest], now: datetime) -> None:
        self._job = job
        self._now = now
        self._pods = pods
        self._old = job.get("status") or {}
        spec = job["spec"]
        parallelism = spec.get("parallelism")
        self._parallelism = 1 if parallelism is None else int(parallelism)
        self.completions = int(spec.get("completions") or 1)
        self.unfinished = [pod for pod in pods if not _is_terminal(pod)]
        self.active = [p for p in self.unfinished if not p["metadata"].get("deletionTimestamp")]
        done = {index_of(pod) for pod in pods if _phase(pod) == "Succeeded"}
        self.succeeded = done | _parse_indexes(self._old.get("completedIndexes") or "")
        actions = [(pod, _policy_action(spec, pod)) for pod in pods if _phase(pod) == "Failed"]
        self._failed = [pod for pod, action in actions if action != "Ignore"]
        self._failing = [pod for pod, action in actions if action == "FailJob"]

    @property
    def started(self) -> datetime:
        """When the Job was first looked at."""
        time = self._old.get("startTime")
        return _parse(time) if time else self._now

    def failure(self) -> tuple[str, str] | None:
        """Reason and message when the Job has failed."""
        deadline = self._job["spec"].get("activeDeadlineSeconds")
        if deadline is not None and (self._now - self.started).total_seconds() >= deadline:
            return "DeadlineExceeded", "Job was active longer than specified deadline"
        if self._failing:
            name = self._failing[0]["metadata"]["name"]
            return "PodFailurePolicy", f"Pod {name} has failed as its podFailurePolicy names it"
        limit = self._job["spec"].get("backoffLimit")
        if len(self._failed) > (6 if limit is None else int(limit)):
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        return None

    def missing(self) -> Iterable[Manifest]:
        """Pods to make now."""
        if self._failed:
            last = max(_ended_at(pod, self._now) for pod in self._failed)
            wait = FIRST_BACKOFF_SECONDS * 2.0 ** min(len(self._failed) - 1, 10)
            if (self._now - last).total_seconds() < min(wait, LONGEST_BACKOFF_SECONDS):
                return
        taken = {index_of(pod) for pod in self.unfinished} | self.succeeded
        free = max(0, self._parallelism - len(self.unfinished))
        for index in [i for i in range(self.completions) if i not in taken][:free]:
            yield _pod(self._job, index, sum(index_of(pod) == index for pod in self._pods))

    def status(self) -> Manifest:
        """Counts."""
        counted = {key: value for key, value in self._old.items() if key != "conditions"}
        conditions = self._old.get("conditions") or []
        status: Manifest = {
            **counted,
            "startTime": _format(self.started),
            "active": len(self.active),
            "ready": sum(_is_ready(pod) for pod in self.active),
            "terminating": len(self.unfinished) - len(self.active),
            "succeeded": len(self.succeeded),
            "failed": len(self._failed),
            "completedIndexes": _format_indexes(self.succeeded),
            "uncountedTerminatedPods": {},
        }
        return status | ({"conditions": conditions} if conditions else {})


def index_of(pod: Manifest) -> int:
    """The completion index of a pod; 0 without one."""
    return int((pod["metadata"].get("annotations") or {}).get(INDEX, 0))


def _pod(job: Manifest, index: int, attempt: int) -> Manifest:
    metadata, template = job["metadata"], job["spec"]["template"]
    own = template.get("metadata") or {}
    spec = copy.deepcopy(template["spec"])
    for container in spec["containers"]:
        variables = container.setdefault("env", [])
        if all(item["name"] != INDEX_VARIABLE for item in variables):
            path = {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{INDEX}']"}
            variables.append({"name": INDEX_VARIABLE, "valueFrom": {"fieldRef": path}})
    # Named after the attempt: a controller that starts again makes the same pod, not a second one.
    suffix = digest([metadata["uid"], index, attempt], 5)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{metadata['name']}-{index}-{suffix}",
            "namespace": metadata["namespace"],
            "labels": {
                **(own.get("labels") or {}),
                JOB_NAME: metadata["name"],
                "job-name": metadata["name"],
                CONTROLLER_UID: metadata["uid"],
                "controller-uid": metadata["uid"],
                INDEX: str(index),
            },
            "annotations": {**(own.get("annotations") or {}), INDEX: str(index)},
            "ownerReferences": [
                {
                    "apiVersion": job["apiVersion"],
                    "kind": job["kind"],
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": spec,
    }


def _policy_action(spec: Manifest, pod: Manifest) -> str:
    """What the podFailurePolicy says about a failed pod: the first rule that fits."""
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or []:
        if _fits(rule, pod):
            return str(rule["action"])
    return "Count"


def _fits(rule: Manifest, pod: Manifest) -> bool:
    status = pod.get("status") or {}
    found = {(item["type"], item["status"]) for item in status.get("conditions") or []}
    for pattern in rule.get("onPodConditions") or []:
        if (pattern["type"], pattern.get("status", "True")) in found:
            return True
    codes = rule.get("onExitCodes")
    if not codes:
        return False
    for container in status.get("containerStatuses") or []:
        code = container["state"].get("terminated", {}).get("exitCode", 0)
        named = codes.get("containerName") in (None, container["name"])
        if named and code != 0 and (code in codes["values"]) == (codes["operator"] == "In"):
            return True
    return False


def _end(status: Manifest, kind: str, reason: str, message: str, *, now: datetime) -> Manifest:
    target = "SuccessCriteriaMet" if kind == "Complete" else "FailureTarget"
    conditions = [
        {
            "type": name,
            "status": "True",
            "reason": reason,
            "message": message,
            "lastProbeTime": _format(now),
            "lastTransitionTime": _format(now),
        }
        for name in (target, kind)
    ]
    return {**status, "conditions": conditions}


def _phase(pod: Manifest) -> str:
    return str((pod.get("status") or {}).get("phase", "Pending"))


def _is_terminal(pod: Manifest) -> bool:
    return _phase(pod) in ("Succeeded", "Failed")


def _is_ready(pod: Manifest) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def _ended_at(pod: Manifest, default: datetime) -> datetime:
    times: list[Any] = [
        item["state"].get("terminated", {}).get("finishedAt")
        for item in (pod.get("status") or {}).get("containerStatuses") or []
    ]
    known = [_parse(time) for time in times if time]
    return max(known) if known else default


def _parse_indexes(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _format_indexes(indexes: set[int]) -> str:
    parts: list[list[int]] = []
    for index in sorted(indexes):
        if parts and parts[-1][-1] == index - 1:
            parts[-1] = [parts[-1][0], index]
        else:
            parts.append([index])
    return ",".join("-".join(str(number) for number in part) for part in parts)


def _parse(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _format(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
