"""What Jobs say about themselves."""

from __future__ import annotations

from datetime import datetime

from inferscale_operator.desired.kinds import JOB, Manifest
from inferscale_operator.desired.naming import ATTEMPT, INPUT
from inferscale_operator.planner.conditions import parse_timestamp
from inferscale_operator.planner.plan import Ref


def input_of(job: Manifest) -> str:
    """Digest of what a Job was started for."""
    return str(job["metadata"]["labels"][INPUT])


def attempt_of(job: Manifest) -> int:
    """Number of the start for this input."""
    return int(job["metadata"]["labels"].get(ATTEMPT, 0))


def is_deleting(item: Manifest) -> bool:
    """Whether an object is on its way out."""
    return bool(item["metadata"].get("deletionTimestamp"))


def job_ref(job: Manifest) -> Ref:
    """A Job to delete."""
    return Ref(JOB, job["metadata"]["name"], job["metadata"]["uid"])


def _conditions(job: Manifest) -> list[Manifest]:
    found: list[Manifest] = job.get("status", {}).get("conditions", [])
    return [item for item in found if item.get("status") == "True"]


def has_condition(job: Manifest, name: str) -> bool:
    """Whether a Job has a condition that holds."""
    return any(item["type"] == name for item in _conditions(job))


def is_finished(job: Manifest) -> bool:
    """Whether a Job has ended, well or not."""
    return has_condition(job, "Complete") or has_condition(job, "Failed")


def finished_at(job: Manifest) -> datetime | None:
    """When a Job ended, or None."""
    for item in _conditions(job):
        if item["type"] in ("Complete", "Failed") and item.get("lastTransitionTime"):
            return parse_timestamp(item["lastTransitionTime"])
    return None


def failure_message(job: Manifest) -> str:
    """What the Job itself says about its failure."""
    for item in _conditions(job):
        if item["type"] == "Failed":
            return f"{item.get('reason', 'Failed')}: {item.get('message', '')}".strip(": ")
    return "the job failed"
