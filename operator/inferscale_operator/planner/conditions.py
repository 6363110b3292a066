"""Conditions: kept transition times, summary, and the Events that their changes are worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.planner.plan import EventRecord

MESSAGE_LIMIT = 1024
"""Longest message in characters; longer texts of pods and servers are cut."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A condition as decided now.

    Attributes:
        type: Name of the condition.
        status: True, False, or None for Unknown.
        reason: CamelCase word.
        message: Sentence: field, value and mend.
        warning: Whether a person has to act.
    """

    type: str
    status: bool | None
    reason: str
    message: str = ""
    warning: bool = False


def timestamp(moment: datetime) -> str:
    """RFC 3339 in whole seconds, as the API server writes times."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> datetime:
    """Reads a time of the API server."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def summarise(drafts: Sequence[Draft], ready: str, message: str = "") -> Draft:
    """The condition ``Ready``: true when all are, else the first that is not.

    Args:
        drafts: In the order in which a person should read them.
        ready: Reason when all hold.
        message: Message when all hold.
    """
    for draft in drafts:
        if draft.status is not True:
            status = draft.status if draft.status is None else False
            return Draft("Ready", status, draft.reason, draft.message, draft.warning)
    return Draft("Ready", True, ready, message)


def merge_conditions(
    old: Iterable[Manifest], drafts: Sequence[Draft], generation: int, now: datetime
) -> list[Manifest]:
    """The conditions to write.

    Args:
        old: Conditions of the live object.
        drafts: All conditions as decided now; others are dropped.
        generation: ``metadata.generation`` that they were computed from.
        now: Time for conditions whose status changes.

    Returns:
        Conditions in the order of ``drafts``; the transition time of an equal status is kept.
    """
    before = {condition["type"]: condition for condition in old}
    merged = []
    for draft in drafts:
        status = {True: "True", False: "False", None: "Unknown"}[draft.status]
        known = before.get(draft.type, {})
        same = known.get("status") == status and known.get("lastTransitionTime")
        merged.append(
            {
                "type": draft.type,
                "status": status,
                "reason": draft.reason,
                "message": draft.message[:MESSAGE_LIMIT],
                "observedGeneration": generation,
                "lastTransitionTime": known["lastTransitionTime"] if same else timestamp(now),
            }
        )
    return merged


def transition_events(old: Iterable[Manifest], drafts: Sequence[Draft]) -> tuple[EventRecord, ...]:
    """Events for conditions whose status or reason changed; none for a new message alone.

    ``Ready`` repeats another condition unless it is true, so only then it is worth an Event.
    """
    before = {condition["type"]: condition for condition in old}
    events = []
    for draft in drafts:
        known = before.get(draft.type, {})
        status = {True: "True", False: "False", None: "Unknown"}[draft.status]
        unchanged = (known.get("status"), known.get("reason")) == (status, draft.reason)
        if unchanged or (draft.type == "Ready" and draft.status is not True):
            continue
        kind = "Warning" if draft.warning else "Normal"
        message = draft.message[:MESSAGE_LIMIT] or f"{draft.type} is {status}"
        events.append(EventRecord(kind, draft.reason, message))
    return tuple(events)
