"""What to do about a MemoryStore: keep its children, run encoding jobs, say what is so."""

from __future__ import annotations

from pydantic import ValidationError

from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.desired.encoder import build_encoder_base
from inferscale_operator.desired.kinds import CLAIM, CONFIG_MAP, JOB, Manifest, kind_of
from inferscale_operator.desired.naming import INPUT
from inferscale_operator.desired.stores import store_claim, store_url
from inferscale_operator.planner.canary import store_degraded_draft
from inferscale_operator.planner.conditions import (
    Draft,
    merge_conditions,
    summarise,
    timestamp,
    transition_events,
)
from inferscale_operator.planner.encoding import Run, decide_run
from inferscale_operator.planner.erasure import plan_deletion
from inferscale_operator.planner.invalid import plan_invalid
from inferscale_operator.planner.plan import Defaults, Observed, Plan, Ref, earliest
from inferscale_operator.planner.requirements import (
    first_missing,
    source_requirements,
    storage_requirements,
)
from inferscale_operator.planner.schedule import check_schedule, next_due
from inferscale_operator.planner.tiers import fastest_tier
from inferscale_runtime.budget import ConfigError


def plan(resource: Manifest, observed: Observed, defaults: Defaults) -> Plan:
    """Decides the next step for one MemoryStore.

    Args:
        resource: The live object.
        observed: What was seen.
        defaults: How the operator was installed.

    Returns:
        What to do now. Carrying it out and planning again comes to rest.
    """
    try:
        spec = MemoryStoreSpec.model_validate(resource.get("spec", {}))
        if resource["metadata"].get("deletionTimestamp"):
            return plan_deletion(resource, spec, observed, defaults)
        return _plan_live(resource, spec, observed, defaults)
    except (ValidationError, ConfigError) as error:
        return plan_invalid(resource, observed, error)


def _plan_live(
    resource: Manifest, spec: MemoryStoreSpec, observed: Observed, defaults: Defaults
) -> Plan:
    base = build_encoder_base(resource, spec, defaults)
    source = _source_condition(spec, observed)
    storage = _storage_condition(resource, spec, observed)
    blocked = next((draft for draft in (source, storage) if draft.status is False), None)
    run = decide_run(resource, spec, observed, defaults, blocked)
    drafts = [source, storage, run.condition]
    drafts.append(_ready(drafts, run))
    degraded = store_degraded_draft(resource["metadata"]["name"], observed.references)
    drafts += [degraded] if degraded is not None else []
    status = _status(resource, spec, observed, run, drafts)
    keep = {(item["kind"], item["metadata"]["name"]) for item in (*base, *run.create)}
    return Plan(
        finalizer=spec.retention.on_delete == "Erase" or None,
        create=run.create,
        apply=tuple(base),
        delete=(*run.delete, *_orphans(observed, keep)),
        status=status,
        events=(
            *run.events,
            *transition_events(resource.get("status", {}).get("conditions", []), drafts),
        ),
        requeue_seconds=earliest(run.requeue_seconds, _next_look(spec, observed)),
    )


def _source_condition(spec: MemoryStoreSpec, observed: Observed) -> Draft:
    missing = first_missing(source_requirements(spec), observed)
    if missing is not None:
        return Draft("SourceReady", False, missing[0], missing[1], warning=True)
    source = spec.source
    if source.config_map is not None and source.config_map.key is None:
        live = observed.references[CONFIG_MAP.kind, source.config_map.name]
        if not any(key.endswith(".jsonl") for key in live.get("data", {})):
            return Draft(
                "SourceReady",
                False,
                "ConfigMapKeyMissing",
                f"spec.source.configMap: ConfigMap '{source.config_map.name}' has no key that "
                "ends in '.jsonl'; add one, or name the key in spec.source.configMap.key",
                warning=True,
            )
    if source.refresh is not None:
        problem = check_schedule(source.refresh)
        if problem is not None:
            return Draft(
                "SourceReady",
                False,
                "InvalidSchedule",
                f"spec.source.refresh '{source.refresh}': {problem}; write five cron fields, "
                "for example '0 3 * * *'",
                warning=True,
            )
    return Draft("SourceReady", True, "Found")


def _storage_condition(resource: Manifest, spec: MemoryStoreSpec, observed: Observed) -> Draft:
    missing = first_missing(storage_requirements(spec), observed)
    if missing is not None:
        return Draft("StorageBound", False, missing[0], missing[1], warning=True)
    name = store_claim(resource["metadata"]["name"], spec)
    if name is None:
        return Draft("StorageBound", True, "ObjectStorage")
    phase = (observed.find(CLAIM, name) or {}).get("status", {}).get("phase", "Pending")
    if phase == "Lost":
        return Draft(
            "StorageBound",
            False,
            "ClaimLost",
            f"PersistentVolumeClaim '{name}' has lost its volume; restore the volume, or make "
            "another MemoryStore",
            warning=True,
        )
    return Draft("StorageBound", True, "Bound" if phase == "Bound" else "WaitingForFirstPod")


def _ready(drafts: list[Draft], run: Run) -> Draft:
    """Ready is about the current spec: a refresh under way or failed leaves it true."""
    if run.usable:
        detail = "" if run.condition.status is True else run.condition.message
        reason = "Encoded" if run.condition.status is True else run.condition.reason
        return Draft("Ready", True, reason, detail)
    return summarise(drafts, "Encoded")


def _status(
    resource: Manifest,
    spec: MemoryStoreSpec,
    observed: Observed,
    run: Run,
    drafts: list[Draft],
) -> Manifest:
    old = resource.get("status", {})
    name = resource["metadata"]["name"]
    generation = resource["metadata"].get("generation", 0)
    status: Manifest = {
        **{key: value for key, value in old.items() if key not in ("nextSyncTime",)},
        **run.status,
        "observedGeneration": generation,
        "tier": _tier(name, spec, observed),
        # A claim's name, or the URL in object storage.
        "location": store_claim(name, spec) or store_url(name, spec, ""),
        "conditions": merge_conditions(old.get("conditions", []), drafts, generation, observed.now),
    }
    if spec.source.refresh is not None and drafts[0].reason != "InvalidSchedule":
        status["nextSyncTime"] = timestamp(next_due(spec.source.refresh, observed.now))
    return status


def _tier(name: str, spec: MemoryStoreSpec, observed: Observed) -> str:
    """Where servers keep it, else where it lies."""
    tier = fastest_tier(name, observed.references)
    stored = "object" if spec.storage.s3 is not None else "disk"
    return stored if tier in (None, "disk") else str(tier)


def _next_look(spec: MemoryStoreSpec, observed: Observed) -> float | None:
    """A ConfigMap is looked at each minute; a schedule wakes the plan when it is due."""
    if spec.source.config_map is not None:
        return 45.0
    if spec.source.refresh is not None and check_schedule(spec.source.refresh) is None:
        due = next_due(spec.source.refresh, observed.now)
        return max(1.0, (due - observed.now).total_seconds())
    return None


def _orphans(observed: Observed, keep: set[tuple[str, str]]) -> list[Ref]:
    """Children that are not wanted any more; runs and the store's own claim are not among them."""
    found = []
    for (kind, name), live in sorted(observed.children.items()):
        if (kind, name) in keep or live["metadata"].get("deletionTimestamp"):
            continue
        labels = live["metadata"].get("labels", {})
        if kind == JOB.kind or INPUT in labels or (kind == CLAIM.kind and name.endswith("-store")):
            continue
        found.append(Ref(kind_of(live), name, live["metadata"]["uid"]))
    return found
