"""What a pod's status says, for conditions: why it does not run, how it ended, its report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.planner.conditions import parse_timestamp

BAD_INPUT_EXIT = 2
"""Exit code of ``inferscale`` for what only a person can mend."""

_STUCK = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    }
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod does not run.

    Attributes:
        reason: Reason as the kubelet or the scheduler gives it.
        message: Its message, or the last line of the container that failed.
        image: Image of the container, ``""`` when it is not about the image.
    """

    reason: str
    message: str
    image: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a pod's container ended.

    Attributes:
        exit_code: Its exit code; -1 when the pod was lost without one.
        message: Its termination message.
        finished: When it ended, or None.
    """

    exit_code: int
    message: str
    finished: datetime | None


def containers(pod: Manifest) -> Iterator[Manifest]:
    """Statuses of the pod's containers."""
    yield from pod.get("status", {}).get("containerStatuses", [])


def last_line(text: str) -> str:
    """The last line that is not empty; errors of ``inferscale`` are one line at the end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def trouble(pod: Manifest) -> Trouble | None:
    """Why a pod cannot start, or keeps failing; None when nothing is known against it."""
    for status in containers(pod):
        waiting = status.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") in _STUCK:
            died = status.get("lastState", {}).get("terminated", {})
            message = last_line(died.get("message", "")) or waiting.get("message", "")
            image = status.get("image", "") if "mage" in waiting["reason"] else ""
            return Trouble(waiting["reason"], message, image)
    for condition in pod.get("status", {}).get("conditions", []):
        unschedulable = condition.get("type") == "PodScheduled" and condition["status"] == "False"
        if unschedulable:
            reason = condition.get("reason", "Unschedulable")
            return Trouble(reason, condition.get("message", "no node fits"))
    return None


def first_trouble(pods: Iterable[Manifest]) -> Trouble | None:
    """The first trouble of several pods, by name."""
    for pod in sorted(pods, key=lambda item: str(item["metadata"]["name"])):
        found = trouble(pod)
        if found is not None:
            return found
    return None


def ended(pod: Manifest) -> Ended | None:
    """How a finished pod ended; None while it may still run."""
    phase = pod.get("status", {}).get("phase")
    if phase not in ("Succeeded", "Failed"):
        return None
    for status in containers(pod):
        state = status.get("state", {}).get("terminated")
        if state:
            finished = state.get("finishedAt")
            return Ended(
                int(state.get("exitCode", -1)),
                state.get("message", ""),
                parse_timestamp(finished) if finished else None,
            )
    return Ended(-1, pod.get("status", {}).get("message", ""), None)


def report(text: str) -> dict[str, Any] | None:
    """The JSON report in a termination message, or None."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
