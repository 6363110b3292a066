"""A stand-in for the Job controller and the kubelet: Jobs end as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from tests.integration.kube.api import Api, ApiError

REPORT = {
    "users": 1,
    "facts": 2,
    "encoded": 2,
    "removed": 0,
    "store_bytes": 4096,
    "fingerprint": "f" * 64,
    "seconds": 1.5,
    "tokens": 20,
    "shard": 0,
}
End = tuple[int, str]
"""Exit code and termination message of every pod of a Job."""


def now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def succeed(_: dict[str, Any]) -> End | None:
    """Every Job ends well."""
    return 0, json.dumps(REPORT)


def stay(_: dict[str, Any]) -> End | None:
    """No Job ends."""
    return None


class JobLoop:
    """Ends Jobs of one namespace, in a thread.

    Attributes:
        policy: How a Job ends, or None while it runs; a test may replace it at any time.
        ended: Names of the Jobs that were ended, in order.
    """

    def __init__(self, api: Api, policy: Callable[[dict[str, Any]], End | None]) -> None:
        self._api = api
        self.policy = policy
        self.ended: list[str] = []
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Starts."""
        self._thread.start()

    def stop(self) -> None:
        """Ends; raises what ended it before."""
        self._stop.set()
        self._thread.join(30)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.1):
                for job in self._api.list("jobs"):
                    self._look_or_later(job)
        except Exception as error:
            self._error = error

    def _look_or_later(self, job: dict[str, Any]) -> None:
        try:
            self._look(job)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    def _look(self, job: dict[str, Any]) -> None:
        if job["metadata"].get("deletionTimestamp"):
            self._let_go(job)
            return
        if any(item["status"] == "True" for item in job.get("status", {}).get("conditions", [])):
            return
        end = self.policy(job)
        if end is None:
            return
        for index in range(job["spec"].get("completions", 1)):
            self._pod(job, index, *end)
        condition = {"type": "Complete" if end[0] == 0 else "Failed", "status": "True"}
        if end[0]:
            condition |= {"reason": "BackoffLimitExceeded", "message": "a pod failed"}
        condition |= {"lastTransitionTime": now(), "lastProbeTime": now()}
        status: dict[str, Any] = {"conditions": [condition], "startTime": now()}
        if end[0] == 0:
            status |= {"completionTime": now(), "succeeded": job["spec"].get("completions", 1)}
        else:
            status |= {"failed": 1}
        self._api.patch("jobs", job["metadata"]["name"], {"status": status}, "status")
        self.ended.append(job["metadata"]["name"])

    def _let_go(self, job: dict[str, Any]) -> None:
        """Without a garbage collector a foreground deletion waits for this."""
        left = [
            item for item in job["metadata"].get("finalizers", []) if item != "foregroundDeletion"
        ]
        body = {"metadata": {"finalizers": left, "uid": job["metadata"]["uid"]}}
        self._api.patch("jobs", job["metadata"]["name"], body)

    def _pod(self, job: dict[str, Any], index: int, code: int, message: str) -> None:
        name = f"{job['metadata']['name']}-{index}"
        template = job["spec"]["template"]
        labels = {
            **template["metadata"].get("labels", {}),
            "batch.kubernetes.io/job-name": job["metadata"]["name"],
            "batch.kubernetes.io/job-completion-index": str(index),
        }
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": labels,
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                "ownerReferences": [owner],
            },
            "spec": template["spec"],
        }
        try:
            self._api.create("pods", body)
        except ApiError as error:
            if error.code != 409:
                raise
        terminated = {
            "exitCode": code,
            "reason": "Completed" if code == 0 else "Error",
            "message": message,
            "startedAt": now(),
            "finishedAt": now(),
        }
        container = {
            "name": template["spec"]["containers"][0]["name"],
            "ready": False,
            "restartCount": 0,
            "image": template["spec"]["containers"][0]["image"],
            "imageID": "",
            "state": {"terminated": terminated},
        }
        status = {"phase": "Succeeded" if code == 0 else "Failed", "containerStatuses": [container]}
        self._api.patch("pods", name, {"status": status}, "status")


@contextmanager
def ending_jobs(
    api: Api, policy: Callable[[dict[str, Any]], End | None] = succeed
) -> Iterator[JobLoop]:
    """A loop for the length of a block."""
    loop = JobLoop(api, policy)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()
