"""Deleting a MemoryStore: its bytes go first, within a bounded time.

Who removes the bytes depends on how the deletion came. The usual way is an erase Job. Where no pod
can start any more (the namespace is being deleted, or a foreground deletion has already taken the
operator's own claim), the bytes go with the claim.
"""

from __future__ import annotations

from datetime import timedelta

from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.desired.encoder import build_erase_job, erase_name
from inferscale_operator.desired.kinds import CLAIM, JOB, Manifest
from inferscale_operator.desired.naming import FINALIZER, INPUT
from inferscale_operator.desired.stores import store_claim
from inferscale_operator.planner.conditions import (
    Draft,
    merge_conditions,
    parse_timestamp,
)
from inferscale_operator.planner.jobs import has_condition, is_deleting, job_ref
from inferscale_operator.planner.plan import Defaults, EventRecord, Observed, Plan, Ref
from inferscale_operator.planner.pods import ended, last_line, report

RETRY_SECONDS = 5.0


def plan_deletion(
    resource: Manifest, spec: MemoryStoreSpec, observed: Observed, defaults: Defaults
) -> Plan:
    """Decides the next step of a deletion; never makes children again.

    Args:
        resource: The MemoryStore, with a deletion timestamp.
        spec: Its spec.
        observed: What was seen.
        defaults: ``erase_timeout_seconds`` bounds how long the finalizer stays.
    """
    if FINALIZER not in resource["metadata"].get("finalizers", []):
        return Plan()
    writers = [job for job in observed.of_kind(JOB) if INPUT in job["metadata"]["labels"]]
    eraser = observed.children.get((JOB.kind, erase_name(resource)))
    stop = tuple(job_ref(job) for job in writers if not is_deleting(job))
    release = _release_reason(resource, spec, observed, writers)
    if release is not None:
        done = (*stop, job_ref(eraser)) if eraser is not None and not is_deleting(eraser) else stop
        return Plan(finalizer=False, delete=done, events=(release,))
    started = parse_timestamp(resource["metadata"]["deletionTimestamp"])
    if observed.now >= started + timedelta(seconds=defaults.erase_timeout_seconds):
        place = _place(resource)
        message = (
            f"the bytes in '{place}' were not erased within {defaults.erase_timeout_seconds} s; "
            "run 'inferscale store erase' there"
        )
        rest = (*stop, job_ref(eraser)) if eraser is not None else stop
        return Plan(
            finalizer=False,
            delete=rest,
            events=(EventRecord("Warning", "EraseIncomplete", message),),
        )
    if writers:
        # A job that the status does not know yet may have written all the same.
        old = resource.get("status", {})
        known = {"job": {"name": writers[0]["metadata"]["name"]}, **old}
        resource = {**resource, "status": known}
        return _wait(resource, observed, "the encoding job is being stopped", delete=stop)
    if eraser is not None and has_condition(eraser, "Complete"):
        # The Job has no owner, so it goes first: nothing would remove it after the resource.
        receipt = report(_termination_message(eraser, observed)) or {}
        figures = f"{receipt.get('files', '?')} files, {receipt.get('bytes', '?')} bytes"
        message = f"erased from '{_place(resource)}': {figures}"
        return _wait(resource, observed, message, delete=(job_ref(eraser),), reason="Erased")
    if eraser is None:
        job = build_erase_job(resource, spec, defaults)
        return _wait(resource, observed, "the erase job is started", create=(job,))
    if has_condition(eraser, "Failed"):
        text = last_line(_termination_message(eraser, observed)) or "the erase job failed"
        again = () if is_deleting(eraser) else (job_ref(eraser),)
        return _wait(resource, observed, f"{text}; it is tried again", delete=again, warning=True)
    return _wait(resource, observed, "the erase job runs")


def _release_reason(
    resource: Manifest,
    spec: MemoryStoreSpec,
    observed: Observed,
    writers: list[Manifest],
) -> EventRecord | None:
    """Why nothing is left to do, or None."""
    place = _place(resource)
    if spec.retention.on_delete == "Retain":
        return EventRecord("Normal", "Retained", f"stored bytes stay in '{place}'")
    for condition in resource.get("status", {}).get("conditions", []):
        if (condition["type"], condition["reason"]) == ("Ready", "Erased"):
            return EventRecord("Normal", "Erased", condition["message"])
    never_written = not writers and not resource.get("status", {}).get("job", {}).get("name")
    if never_written:
        return EventRecord("Normal", "Erased", "nothing had been stored")
    name = store_claim(resource["metadata"]["name"], spec)
    if name is not None:
        claim = observed.find(CLAIM, name)
        if claim is None or is_deleting(claim) or observed.namespace_terminating:
            return EventRecord("Normal", "Erased", f"the bytes go with the claim '{name}'")
    elif observed.namespace_terminating:
        message = f"no pod can start in a namespace that is being deleted; erase '{place}' by hand"
        return EventRecord("Warning", "EraseIncomplete", message)
    return None


def _place(resource: Manifest) -> str:
    return str(resource.get("status", {}).get("location", ""))


def _wait(
    resource: Manifest,
    observed: Observed,
    message: str,
    *,
    create: tuple[Manifest, ...] = (),
    delete: tuple[Ref, ...] = (),
    warning: bool = False,
    reason: str = "Erasing",
) -> Plan:
    old = resource.get("status", {})
    generation = resource["metadata"].get("generation", 0)
    draft = Draft("Ready", False, reason, message, warning)
    kept = [item for item in old.get("conditions", []) if item["type"] != "Ready"]
    conditions = merge_conditions(old.get("conditions", []), [draft], generation, observed.now)
    return Plan(
        create=create,
        delete=delete,
        status={**old, "observedGeneration": generation, "conditions": [*kept, *conditions]},
        requeue_seconds=RETRY_SECONDS,
    )


def _termination_message(job: Manifest, observed: Observed) -> str:
    name = job["metadata"]["name"]
    for pod in observed.pods:
        if pod["metadata"].get("labels", {}).get("batch.kubernetes.io/job-name") == name:
            end = ended(pod)
            if end is not None and end.message:
                return end.message
    return ""
