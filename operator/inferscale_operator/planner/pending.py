"""When facts that were written through the memory API get an encoding job.

Servers count the facts that have no KV yet; the counts reach a MemoryStore through the status of
the PersonalizedModels that use it. ``status.pending.runs`` is part of a run's input, so raising it
is what starts a job; the rest is as for any other source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.kinds import MEMORY_STORE, PERSONALIZED_MODEL, Manifest
from inferscale_operator.planner.conditions import timestamp
from inferscale_operator.planner.plan import Observed
from inferscale_operator.planner.pod_status import read_pod_status

LOOK_SECONDS = 15.0
"""How often the counts are looked at: half as often as they are made."""
SETTLE_SECONDS = 120.0
"""Counts are not believed for so long after a job: they may be older than its end."""
TOO_LONG_SECONDS = 3600.0
"""Least time between jobs when no more facts wait than the last job could not encode."""


@dataclass(frozen=True, slots=True)
class Pending:
    """What a pass decides about waiting facts.

    Attributes:
        status: Fields of ``status``.
        requeue_seconds: When to look again.
    """

    status: Manifest = field(default_factory=dict)
    requeue_seconds: float | None = None


def waiting_facts(name: str, observed: Observed) -> int | None:
    """Facts of a store without KV, as its servers said last; None when none of them has said."""
    counts = [
        int(entry.get("facts", 0))
        for (kind, _), model in observed.references.items()
        if kind == PERSONALIZED_MODEL.kind
        for entry in (model.get("status") or {}).get("pendingFacts") or []
        if entry.get("name") == name
    ]
    return max(counts) if counts else None


def decide_pending(resource: Manifest, spec: MemoryStoreSpec, observed: Observed) -> Pending:
    """Decides whether a store whose last job is done needs another one."""
    api = spec.source.api
    if api is None:
        return Pending()
    status = resource.get("status", {})
    old = status.get("pending") or {}
    known = waiting_facts(resource["metadata"]["name"], observed)
    finished = _time((status.get("job") or {}).get("finishedAt"))
    if known is None or (finished and observed.now < finished + timedelta(seconds=SETTLE_SECONDS)):
        return Pending(requeue_seconds=LOOK_SECONDS)
    pending: Manifest = {**old, "facts": known}
    if not known:
        pending.pop("since", None)
        return Pending({"pending": pending}, LOOK_SECONDS)
    since = _time(old.get("since")) or observed.now
    pending["since"] = timestamp(since)
    news = known - int(old.get("tooLong", 0))
    wait = float(api.pending_seconds)
    if news <= 0:
        wait = max(wait, TOO_LONG_SECONDS)
    due = since + timedelta(seconds=wait)
    if spec.suspend or (news < api.pending_facts and observed.now < due):
        return Pending({"pending": pending}, LOOK_SECONDS)
    pending.pop("since")
    return Pending({"pending": {**pending, "runs": int(old.get("runs", 0)) + 1}}, 1.0)


def model_pending(
    spec: PersonalizedModelSpec, observed: Observed, old: Sequence[Manifest]
) -> list[Manifest]:
    """``status.pendingFacts`` of a PersonalizedModel: the largest counts of its pods, or the old.

    Args:
        spec: Its spec.
        observed: What was seen: its stores, and what its pods said.
        old: The list as it is.
    """
    counts: dict[str, int] = {}
    for pod, document in sorted(observed.reports.items()):
        for name, count in read_pod_status(pod, document, 0.0).pending.items():
            counts[name] = max(count, counts.get(name, 0))
    before = {entry.get("name"): int(entry.get("facts", 0)) for entry in old}
    found = []
    for reference in spec.memory_stores:
        live = observed.references.get((MEMORY_STORE.kind, reference.name)) or {}
        if (live.get("spec") or {}).get("source", {}).get("api") is None:
            continue
        known = counts.get(reference.name, before.get(reference.name))
        if known is not None:
            found.append({"name": reference.name, "facts": known})
    return found


def record_pending(spec: MemoryStoreSpec, status: Manifest, too_long: int) -> Manifest:
    """Fields of ``status`` after a job has ended."""
    if spec.source.api is None:
        return {}
    return {"pending": {**(status.get("pending") or {}), "facts": too_long, "tooLong": too_long}}


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
