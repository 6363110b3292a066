"""``status`` of a Pod from the states of its containers, as a kubelet writes it; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.local.containers import ContainerState
from inferscale_operator.local.environment import POD_IP

DISRUPTION = "DisruptionTarget"


def pod_phase(states: Sequence[ContainerState], *, over: bool) -> str:
    """The phase.

    Args:
        states: Of all containers.
        over: Whether no container will be started again.
    """
    if over:
        codes = [item.state.get("terminated", {}).get("exitCode", 137) for item in states]
        return "Succeeded" if not any(codes) else "Failed"
    if all("waiting" in item.state and not item.last_state for item in states):
        return "Pending"
    return "Running"


def pod_status(
    pod: Manifest,
    states: Mapping[str, ContainerState],
    now: str,
    *,
    over: bool,
    reason: str = "",
    disrupted: bool = False,
) -> Manifest:
    """The whole status.

    Args:
        pod: The live Pod; times of its conditions are kept where nothing changed.
        states: State of each container.
        now: Time of a change, RFC 3339.
        over: Whether no container will be started again.
        reason: Why the pod as a whole failed, for example ``DeadlineExceeded``.
        disrupted: Whether it was ended from outside, which its owner may not count as its failure.
    """
    old = pod.get("status") or {}
    phase = "Failed" if reason else pod_phase(list(states.values()), over=over)
    images = {item["name"]: item.get("image", "") for item in pod["spec"]["containers"]}
    status: Manifest = {
        "phase": phase,
        "startTime": old.get("startTime", now),
        "hostIP": POD_IP,
        "podIP": POD_IP,
        "podIPs": [{"ip": POD_IP}],
        "containerStatuses": [
            _container_status(name, images.get(name, ""), state) for name, state in states.items()
        ],
        "conditions": _conditions(old, states, now, phase, disrupted),
    }
    if reason:
        status["reason"] = reason
    return status


def failed_status(pod: Manifest, now: str) -> Manifest:
    """The status of a pod whose processes are gone without a trace.

    Its owner is told by ``DisruptionTarget`` that this was not the pod's own failure.
    """
    lost = {
        "exitCode": 137,
        "reason": "ContainerStatusUnknown",
        "message": "the processes ended with the program that ran them",
        "finishedAt": now,
    }
    states = {
        item["name"]: ContainerState(state={"terminated": lost})
        for item in pod["spec"]["containers"]
    }
    return pod_status(pod, states, now, over=True, disrupted=True)


def is_ready(pod: Manifest) -> bool:
    """Whether a pod is ready and not on its way out."""
    if pod["metadata"].get("deletionTimestamp"):
        return False
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def _container_status(name: str, image: str, state: ContainerState) -> Manifest:
    status: Manifest = {
        "name": name,
        "image": image,
        "imageID": "",
        "ready": state.ready,
        "started": state.started,
        "restartCount": state.restarts,
        "state": state.state,
        "lastState": state.last_state,
    }
    if state.pid:
        status["containerID"] = f"process://{state.pid}"
    return status


def _conditions(
    old: Mapping[str, Any],
    states: Mapping[str, ContainerState],
    now: str,
    phase: str,
    disrupted: bool,
) -> list[Manifest]:
    unready = [name for name, state in states.items() if not state.ready]
    ready: Manifest = {"status": "True"}
    if unready:
        done = phase in ("Succeeded", "Failed")
        ready = {
            "status": "False",
            "reason": ("PodCompleted" if phase == "Succeeded" else "PodFailed")
            if done
            else "ContainersNotReady",
            "message": f"containers with unready status: [{' '.join(unready)}]",
        }
    wanted = {
        "PodScheduled": {"status": "True"},
        "Initialized": {"status": "True"},
        "ContainersReady": ready,
        "Ready": ready,
    }
    before = {item["type"]: item for item in old.get("conditions") or []}
    if disrupted:
        wanted[DISRUPTION] = {
            "status": "True",
            "reason": "TerminationByKubelet",
            "message": "the machine's executor was stopped",
        }
    elif DISRUPTION in before:
        wanted[DISRUPTION] = {k: v for k, v in before[DISRUPTION].items() if k != "type"}
    return [
        {"type": name, **body, **_since(before.get(name), body, now)}
        for name, body in wanted.items()
    ]


def _since(before: Mapping[str, Any] | None, body: Mapping[str, Any], now: str) -> Manifest:
    if before and before["status"] == body["status"] and "lastTransitionTime" in before:
        return {"lastTransitionTime": before["lastTransitionTime"]}
    return {"lastTransitionTime": now}
