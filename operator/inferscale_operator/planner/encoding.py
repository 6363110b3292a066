"""Which encoding job a MemoryStore needs now, and what the finished ones said.

A run is known by its input: one half for what the spec says (with the job's own settings, so that
more memory is a new try), one for the version of the source. The Job objects are the memory
of attempts; ``status`` only keeps what the last complete run found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.desired.encoder import build_encode_run
from inferscale_operator.desired.kinds import CONFIG_MAP, JOB, Manifest
from inferscale_operator.desired.naming import INPUT, digest
from inferscale_operator.planner.conditions import Draft, timestamp
from inferscale_operator.planner.jobs import (
    attempt_of,
    failure_message,
    finished_at,
    has_condition,
    input_of,
    is_deleting,
    is_finished,
    job_ref,
)
from inferscale_operator.planner.pending import decide_pending, record_pending
from inferscale_operator.planner.plan import Defaults, EventRecord, Observed, Ref
from inferscale_operator.planner.pods import BAD_INPUT_EXIT, ended, first_trouble, last_line, report
from inferscale_operator.planner.requirements import encoder_requirements, first_missing
from inferscale_operator.planner.run_input import HALF, encoded_part, model_key, source_part

POLL_SECONDS = 10.0
"""How often a job under way is looked at without an event: its pods' progress and troubles."""
FIRST_RETRY_SECONDS = 10
LONGEST_RETRY_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Run:
    """The decision about encoding.

    Attributes:
        condition: ``Encoded``.
        usable: Whether what is encoded fits the current spec, newer facts aside.
        create: Config and Job to make.
        delete: Jobs and configs that are done with.
        status: Fields of ``status`` that changed.
        events: Beside those of condition changes.
        requeue_seconds: When to look again.
    """

    condition: Draft
    usable: bool
    create: tuple[Manifest, ...] = ()
    delete: tuple[Ref, ...] = ()
    status: Manifest = field(default_factory=dict)
    events: tuple[EventRecord, ...] = ()
    requeue_seconds: float | None = None


def decide_run(
    resource: Manifest,
    spec: MemoryStoreSpec,
    observed: Observed,
    defaults: Defaults,
    blocked: Draft | None,
) -> Run:
    """Decides about encoding.

    Args:
        resource: The live MemoryStore.
        spec: Its spec.
        observed: What was seen.
        defaults: How the operator was installed.
        blocked: A condition that keeps a job from starting, or None.
    """
    return _Decision(resource, spec, observed, defaults).run(blocked)


class _Decision:
    """One decision; holds what its steps share."""

    def __init__(
        self, resource: Manifest, spec: MemoryStoreSpec, observed: Observed, defaults: Defaults
    ) -> None:
        self.resource = resource
        self.spec = spec
        self.observed = observed
        self.defaults = defaults
        self.status: Manifest = resource.get("status", {})
        self.jobs = [job for job in observed.of_kind(JOB) if INPUT in job["metadata"]["labels"]]

    def run(self, blocked: Draft | None) -> Run:
        """Takes the first step that applies."""
        encoded = encoded_part(self.spec, self.defaults)
        done = str(self.status.get("encodedInput", ""))
        usable = done[:HALF] == encoded
        if blocked is not None:
            return self._waiting(blocked.reason, blocked.message, usable, warning=blocked.warning)
        source = source_part(self.spec, self.observed, self.status)
        if done == encoded + source:
            return self._complete()
        job_part = digest([encoded, self.spec.job.model_dump(mode="json")], HALF)
        wanted = job_part + source
        mine = [job for job in self.jobs if input_of(job) == wanted and not is_deleting(job)]
        others = [job for job in self.jobs if job not in mine]
        busy = [job for job in others if is_deleting(job) or not is_finished(job)]
        if busy:
            return self._make_room(busy, job_part, usable)
        unread = [job for job in others if has_condition(job, "Complete")]
        unread = [job for job in unread if input_of(job)[:HALF] == job_part]
        unread = [job for job in unread if done != encoded + input_of(job)[HALF:]]
        if unread and not usable:
            # The source moved on while this job ran: what it encoded is of use until the next ends.
            return self._record(unread[0], encoded + input_of(unread[0])[HALF:], usable, ())
        if not mine:
            return self._start(wanted, 0, usable, others)
        job = max(mine, key=attempt_of)
        stale = tuple(job_ref(item) for item in self.jobs if item is not job)
        if has_condition(job, "Complete"):
            return self._record(job, encoded + source, usable, stale)
        if has_condition(job, "Failed"):
            return self._failed(job, wanted, usable)
        return self._under_way(job, usable)

    def _complete(self) -> Run:
        facts = self.status.get("facts", {})
        message = f"{facts.get('encoded', 0)} of {facts.get('total', 0)} facts are encoded"
        newest = self.status.get("job", {}).get("name")
        old = [job for job in self.jobs if job["metadata"]["name"] != newest]
        waiting = decide_pending(self.resource, self.spec, self.observed)
        return Run(
            Draft("Encoded", True, "EncodingComplete", message),
            usable=True,
            delete=tuple(job_ref(job) for job in old if not is_deleting(job)) + self._old_configs(),
            status=waiting.status,
            requeue_seconds=waiting.requeue_seconds,
        )

    def _waiting(self, reason: str, message: str, usable: bool, *, warning: bool = False) -> Run:
        return Run(Draft("Encoded", False, reason, message, warning), usable)

    def _make_room(self, busy: list[Manifest], job_part: str, usable: bool) -> Run:
        """Two jobs must not write one store. One for an older source version may end first."""
        wrong = [job for job in busy if input_of(job)[:HALF] != job_part and not is_deleting(job)]
        message = "the job for the former spec is being stopped"
        if not wrong and not any(is_deleting(job) for job in busy):
            return self._under_way(busy[0], usable)
        return Run(
            Draft("Encoded", False, "Replacing", message),
            usable,
            delete=tuple(job_ref(job) for job in wrong),
            requeue_seconds=5.0,
        )

    def _start(self, wanted: str, attempt: int, usable: bool, finished: list[Manifest]) -> Run:
        if self.spec.suspend:
            return self._waiting("Suspended", "spec.suspend is true; no job is started", usable)
        missing = first_missing(encoder_requirements(self.spec), self.observed)
        if missing is not None:
            return self._waiting(missing[0], missing[1], usable, warning=True)
        made = build_encode_run(self.resource, self.spec, self.defaults, wanted, attempt)
        name = made[-1]["metadata"]["name"]
        keep = {item["metadata"]["name"] for item in made}
        reason = "Refreshing" if usable else "Encoding"
        return Run(
            Draft("Encoded", False, reason, f"job '{name}' is started"),
            usable,
            create=tuple(made),
            delete=tuple(job_ref(job) for job in finished)
            + tuple(ref for ref in self._old_configs() if ref.name not in keep),
            status={
                **_former_encoding(usable),
                "job": {"name": name, "input": wanted, "attempt": attempt, "lastError": ""},
            },
            requeue_seconds=POLL_SECONDS,
        )

    def _old_configs(self) -> tuple[Ref, ...]:
        """Configs of runs; a finished run needs none."""
        return tuple(
            Ref(CONFIG_MAP, item["metadata"]["name"], item["metadata"]["uid"])
            for item in self.observed.of_kind(CONFIG_MAP)
            if INPUT in item["metadata"]["labels"] and not is_deleting(item)
        )

    def _config(self, job: Manifest) -> tuple[Manifest, ...]:
        """The config of a job under way; someone may have deleted it before its pod started."""
        run = build_encode_run(
            self.resource, self.spec, self.defaults, input_of(job), attempt_of(job)
        )
        return tuple(item for item in run if item["kind"] == CONFIG_MAP.kind)

    def _pods(self, job: Manifest) -> list[Manifest]:
        name = job["metadata"]["name"]
        return [
            pod
            for pod in self.observed.pods
            if pod["metadata"].get("labels", {}).get("batch.kubernetes.io/job-name") == name
        ]

    def _under_way(self, job: Manifest, usable: bool) -> Run:
        pods = self._pods(job)
        found = first_trouble(pods)
        if found is not None:
            image = f"spec.job.image '{found.image}': " if found.image else ""
            message = f"{image}{found.message}; mend spec.job or the cluster"
            condition = Draft("Encoded", False, found.reason, message, warning=True)
            return Run(condition, usable, self._config(job), requeue_seconds=POLL_SECONDS)
        reports = [self.observed.reports.get(pod["metadata"]["name"], {}) for pod in pods]
        total = sum(_int(item.get("facts")) for item in reports)
        left = sum(
            _int(item.get("pending" if item.get("state") in ("encoding", "done") else "facts"))
            for item in reports
        )
        encoded = total - left
        progress = f"{encoded} of {total} facts" if total else "starting"
        reason = "Refreshing" if usable else "Encoding"
        status = _former_encoding(usable)
        if total and not usable:
            summary = f"{encoded}/{total}"
            status["facts"] = {
                "users": sum(_int(item.get("users")) for item in reports),
                "total": total,
                "encoded": encoded,
                "summary": summary,
            }
        message = f"job '{job['metadata']['name']}': {progress}"
        return Run(
            Draft("Encoded", False, reason, message),
            usable,
            create=self._config(job),
            status=status,
            requeue_seconds=POLL_SECONDS,
        )

    def _record(self, job: Manifest, done: str, usable: bool, stale: tuple[Ref, ...]) -> Run:
        """Takes over what the finished pods reported."""
        reports = []
        for pod in self._pods(job):
            end = ended(pod)
            found = report(end.message) if end is not None and end.exit_code == 0 else None
            if found is not None:
                reports.append(found)
        wanted = int(job["spec"].get("completions", 1))
        fingerprints = {str(item.get("fingerprint", "")) for item in reports}
        if len(reports) < wanted:
            # Pods were cleaned away before they were read. A run with nothing to do is quick.
            return self._start(input_of(job), attempt_of(job) + 1, usable, [*self.jobs])
        if len(fingerprints) != 1:
            message = "the pods of one job reported different fingerprints; pin spec.model.revision"
            return self._waiting("FingerprintsDiffer", message, usable, warning=True)
        facts = sum(_int(item.get("facts")) for item in reports)
        status: Manifest = {
            "facts": {
                "users": sum(_int(item.get("users")) for item in reports),
                "total": facts,
                "encoded": facts,
                "summary": f"{facts}/{facts}",
            },
            "fingerprint": fingerprints.pop(),
            "encodedInput": done,
            "encodedModel": model_key(self.spec.model),
            "storeBytes": sum(_int(item.get("store_bytes")) for item in reports),
            "lastSyncTime": timestamp(finished_at(job) or self.observed.now),
            "job": {
                "name": job["metadata"]["name"],
                "input": input_of(job),
                "attempt": attempt_of(job),
                "finishedAt": timestamp(finished_at(job) or self.observed.now),
                "exitCode": 0,
                "lastError": "",
            },
        }
        status |= record_pending(
            self.spec, self.status, sum(_int(item.get("too_long")) for item in reports)
        )
        shape = reports[0].get("model")
        if isinstance(shape, dict):
            status["modelShape"] = {
                "numLayers": _int(shape.get("num_layers")),
                "numAttentionHeads": _int(shape.get("num_attention_heads")),
                "numKvHeads": _int(shape.get("num_kv_heads")),
                "headDim": _int(shape.get("head_dim")),
                "kvDtype": str(shape.get("dtype", "")),
                "weightBytes": _int(shape.get("weight_bytes")),
            }
        message = f"{facts} of {facts} facts are encoded"
        return Run(
            Draft("Encoded", True, "EncodingComplete", message),
            usable=True,
            delete=stale + self._old_configs(),
            status=status,
            requeue_seconds=1.0,
        )

    def _failed(self, job: Manifest, wanted: str, usable: bool) -> Run:
        """Retries with backoff, and not for ever; what a person has to mend is not retried."""
        exit_code, text = self._failure(job)
        bad_input = exit_code == BAD_INPUT_EXIT
        attempt = attempt_of(job)
        status = {
            "job": {
                "name": job["metadata"]["name"],
                "input": wanted,
                "attempt": attempt,
                "finishedAt": timestamp(finished_at(job) or self.observed.now),
                "exitCode": exit_code,
                "lastError": text[:4096],
            }
        }
        old = tuple(
            job_ref(item) for item in self.jobs if item is not job and not is_deleting(item)
        )
        if bad_input or attempt >= self.spec.job.backoff_limit:
            reason = "BadInput" if bad_input else "EncodingFailed"
            message = f"{text}; nothing is tried again until the spec or the source changes"
            return Run(
                Draft("Encoded", False, reason, message, warning=True),
                usable,
                delete=old,
                status=status,
            )
        wait = timedelta(seconds=min(FIRST_RETRY_SECONDS * 2**attempt, LONGEST_RETRY_SECONDS))
        due = (finished_at(job) or self.observed.now) + wait
        if self.observed.now >= due:
            return self._start(wanted, attempt + 1, usable, [*self.jobs])
        message = f"attempt {attempt + 1} failed: {text}; the next one follows"
        return Run(
            Draft("Encoded", False, "Retrying", message, warning=True),
            usable,
            delete=old,
            status=status,
            requeue_seconds=max(1.0, (due - self.observed.now).total_seconds()),
        )

    def _failure(self, job: Manifest) -> tuple[int, str]:
        """Exit code and last line; what was recorded already, once the pods may be gone."""
        recorded = self.status.get("job", {})
        if recorded.get("name") == job["metadata"]["name"] and recorded.get("finishedAt"):
            return int(recorded.get("exitCode", -1)), str(recorded.get("lastError", ""))
        ends = [end for pod in self._pods(job) if (end := ended(pod)) and end.exit_code != 0]
        # What a person has to mend says most.
        ends.sort(key=lambda end: end.exit_code != BAD_INPUT_EXIT)
        text = next((last_line(end.message) for end in ends if end.message), "")
        return (ends[0].exit_code if ends else -1), text or failure_message(job)


def _former_encoding(usable: bool) -> Manifest:
    """A job for another spec writes over what the status speaks of.

    Who goes back to the former spec gets a job again: it is quick when everything is still there.
    """
    return {} if usable else {"encodedInput": ""}


def _int(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
