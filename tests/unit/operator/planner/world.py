"""A small world for planner tests: carries out plans, plays Job and Deployment controllers."""

from __future__ import annotations

import copy
import itertools
import json
from datetime import UTC, datetime, timedelta
from typing import Any

from inferscale_operator.desired.kinds import JOB, Manifest
from inferscale_operator.desired.naming import FINALIZER, GENERATION, INPUT
from inferscale_operator.planner import memorystore, personalizedmodel
from inferscale_operator.planner.drift import differs
from inferscale_operator.planner.load import PodLoad
from inferscale_operator.planner.plan import ChildKey, Defaults, EventRecord, Observed, Plan

DEFAULTS = Defaults(runtime_image="example.invalid/runtime:1", operator_namespace="inferscale")
FINGERPRINT = "f" * 64


class World:
    """Objects of one namespace and the two kinds' planners; time stands still until it is moved."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
        self.resources: dict[ChildKey, Manifest] = {}
        self.children: dict[tuple[str, ChildKey], Manifest] = {}
        self.others: dict[ChildKey, Manifest] = {}
        self.pods: dict[str, Manifest] = {}
        self.reports: dict[str, dict[str, object]] = {}
        self.report_ages: dict[str, float] = {}
        self.gpu_memory_bytes: int | None = None
        self.events: list[EventRecord] = []
        self.optional_kinds: frozenset[str] = frozenset()
        self.terminating = False
        self.loads: dict[str, PodLoad] = {}
        self.load_history: tuple[tuple[float, float], ...] = ()
        self.held = 0
        self.defaults = DEFAULTS
        self.writes = 0
        self._uids = itertools.count(1)

    def add(self, kind: str, name: str, spec: dict[str, Any]) -> Manifest:
        resource = {
            "apiVersion": "inferscale.dev/v1alpha1",
            "kind": kind,
            "metadata": {
                "name": name,
                "namespace": "team",
                "uid": f"uid-{next(self._uids)}",
                "generation": 1,
                "finalizers": [],
            },
            "spec": copy.deepcopy(spec),
        }
        self.resources[kind, name] = resource
        return resource

    def edit(self, kind: str, name: str, **changes: Any) -> None:
        resource = self.resources[kind, name]
        resource["spec"].update(copy.deepcopy(changes))
        resource["metadata"]["generation"] += 1

    def config_map(self, name: str, data: dict[str, str]) -> None:
        self.others["ConfigMap", name] = {"metadata": {"name": name}, "data": data}

    def secret(self, name: str, *keys: str) -> None:
        self.others["Secret", name] = {
            "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": "1"},
            "data": dict.fromkeys(keys, ""),
        }

    def of(self, owner: str, kind: str) -> list[Manifest]:
        return [
            item
            for (name, (item_kind, _)), item in sorted(self.children.items())
            if name == owner and item_kind == kind
        ]

    def observed(self, resource: Manifest) -> Observed:
        owner = resource["metadata"]["name"]
        references = dict(self.others)
        references |= {key: item for key, item in self.resources.items()}
        return Observed(
            now=self.now,
            children={
                key: copy.deepcopy(item)
                for (name, key), item in self.children.items()
                if name == owner
            },
            references=copy.deepcopy(references),
            pods=tuple(copy.deepcopy(list(self.pods.values()))),
            reports=copy.deepcopy(self.reports),
            report_ages=dict(self.report_ages),
            loads=dict(self.loads),
            load_history=self.load_history,
            held=self.held,
            gpu_memory_bytes=self.gpu_memory_bytes,
            optional_kinds=self.optional_kinds,
            namespace_terminating=self.terminating,
            entropy="random",
        )

    def plan(self, kind: str, name: str) -> Plan:
        resource = self.resources[kind, name]
        module = memorystore if kind == "MemoryStore" else personalizedmodel
        return module.plan(copy.deepcopy(resource), self.observed(resource), self.defaults)

    def step(self, kind: str, name: str) -> Plan:
        """Plans once and carries it out, as the operator does."""
        plan = self.plan(kind, name)
        self._carry_out(self.resources[kind, name], plan)
        return plan

    def settle(self, limit: int = 12) -> None:
        """Plans all resources until nothing is written any more."""
        for _ in range(limit):
            before = self.writes
            for kind, name in list(self.resources):
                if (kind, name) in self.resources:
                    self.step(kind, name)
            if self.writes == before:
                return
        raise AssertionError("the plans do not come to rest")

    def _carry_out(self, resource: Manifest, plan: Plan) -> None:
        owner = resource["metadata"]["name"]
        held = resource["metadata"]["finalizers"]
        if plan.finalizer is not None and plan.finalizer != (FINALIZER in held):
            held.append(FINALIZER) if plan.finalizer else held.remove(FINALIZER)
            self.writes += 1
        for manifest in plan.create:
            key = (owner, (manifest["kind"], manifest["metadata"]["name"]))
            if key not in self.children:
                self._put(key, manifest)
        for manifest in plan.apply:
            key = (owner, (manifest["kind"], manifest["metadata"]["name"]))
            live = self.children.get(key)
            if live is None or differs(manifest, live):
                self._put(key, manifest)
        for ref in plan.delete:
            key = (owner, (ref.kind.kind, ref.name))
            if key in self.children and self.children[key]["metadata"]["uid"] == ref.uid:
                del self.children[key]
                self.writes += 1
        if plan.status is not None and plan.status != resource.get("status"):
            resource["status"] = copy.deepcopy(plan.status)
            self.writes += 1
        self.scale(resource, plan.replicas)
        self.events.extend(plan.events)
        if resource["metadata"].get("deletionTimestamp") and not held:
            self.resources.pop((resource["kind"], owner), None)
            for key in [key for key in self.children if key[0] == owner]:
                if self.children[key]["metadata"].get("ownerReferences"):
                    del self.children[key]

    def scale(self, resource: Manifest, replicas: int | None) -> None:
        """What the scale subresource does, whoever writes it; None writes nothing."""
        if replicas is None:
            return
        serving = resource["spec"].get("serving") or {}
        resource["spec"]["serving"] = {**serving, "replicas": replicas}
        resource["metadata"]["generation"] += 1
        self.writes += 1

    def _put(self, key: tuple[str, ChildKey], manifest: Manifest) -> None:
        self.writes += 1
        live = self.children.get(key, {})
        new = copy.deepcopy(manifest)
        old = live.get("metadata", {})
        new["metadata"]["uid"] = old.get("uid") or f"uid-{next(self._uids)}"
        changed = live.get("spec") != new.get("spec")
        new["metadata"]["generation"] = old.get("generation", 0) + int(changed)
        if "status" in live:
            new["status"] = live["status"]
        self.children[key] = new

    def delete(self, kind: str, name: str) -> None:
        resource = self.resources[kind, name]
        resource["metadata"]["deletionTimestamp"] = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")

    def condition(self, kind: str, name: str, type_: str = "Ready") -> dict[str, Any]:
        found = self.resources[kind, name].get("status", {}).get("conditions", [])
        return next((item for item in found if item["type"] == type_), {})

    # What controllers and kubelets do.

    def active_jobs(self) -> list[Manifest]:
        jobs = [item for (_, (kind, _)), item in sorted(self.children.items()) if kind == "Job"]
        return [job for job in jobs if not job.get("status", {}).get("conditions")]

    def finish(self, job: Manifest, report: dict[str, Any] | None = None) -> None:
        """The job's pods end well and report."""
        name = job["metadata"]["name"]
        erase = INPUT not in job["metadata"]["labels"]
        given = {"fingerprint": FINGERPRINT, "users": 1, "facts": 3, "store_bytes": 100}
        given = {"files": 4, "bytes": 100} if erase else given
        for index in range(job["spec"].get("completions", 1)):
            message = json.dumps(given if report is None else report)
            self._pod(job, f"{name}-{index}", "Succeeded", 0, message)
        self._end(job, "Complete")

    def fail(self, job: Manifest, exit_code: int, message: str) -> None:
        """A pod ends with an error."""
        self._pod(job, f"{job['metadata']['name']}-0", "Failed", exit_code, message)
        self._end(job, "Failed")

    def _end(self, job: Manifest, condition: str) -> None:
        job["status"] = {
            "conditions": [
                {
                    "type": condition,
                    "status": "True",
                    "lastTransitionTime": self.now.strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
            ]
        }

    def _pod(self, job: Manifest, name: str, phase: str, code: int, message: str) -> None:
        self.pods[name] = {
            "metadata": {
                "name": name,
                "labels": {"batch.kubernetes.io/job-name": job["metadata"]["name"]},
            },
            "status": {
                "phase": phase,
                "containerStatuses": [
                    {"state": {"terminated": {"exitCode": code, "message": message}}}
                ],
            },
        }

    def finish_all_jobs(self) -> None:
        for job in self.active_jobs():
            self.finish(job)

    def roll_out(self, deployment: Manifest) -> None:
        """All pods of the deployment's template are ready."""
        replicas = deployment["spec"]["replicas"]
        deployment["status"] = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": replicas,
            "updatedReplicas": replicas,
            "readyReplicas": replicas,
            "availableReplicas": replicas,
        }

    def roll_out_all(self) -> None:
        for (_, (kind, _)), item in self.children.items():
            if kind == "Deployment":
                self.roll_out(item)

    def run_servers(self, *heats: dict[str, float], **figures: Any) -> None:
        """A ready pod for each map of heats by store, in every generation; all others are gone."""
        self.pods = {name: pod for name, pod in self.pods.items() if not name.startswith("server-")}
        self.reports.clear()
        self.report_ages.clear()
        for (_, (kind, deployment)), item in sorted(self.children.items()):
            if kind != "Deployment" or GENERATION not in item["metadata"]["labels"]:
                continue
            for number, heat in enumerate(heats):
                name = f"server-{deployment}-{number}"
                self.pods[name] = {
                    "metadata": {
                        "name": name,
                        "labels": {
                            "app.kubernetes.io/component": "server",
                            GENERATION: item["metadata"]["labels"][GENERATION],
                        },
                    },
                    "status": {
                        "phase": "Running",
                        "conditions": [{"type": "Ready", "status": "True"}],
                    },
                }
                self.reports[name] = pod_report(heat, **figures)

    def tell_load(self, *loads: PodLoad) -> None:
        """Load of the pods of ``run_servers``, in the order of their names."""
        names = sorted(name for name in self.pods if name.startswith("server-"))
        self.loads = dict(zip(names, loads, strict=False))

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def pod_report(
    heat: dict[str, float], dram: int = 320, gpu_free: int | None = None
) -> dict[str, object]:
    """What matters here of a server's status."""
    gpu = (
        {"up": False, "reason": "Driver Not Loaded", "devices": []}
        if gpu_free is None
        else {"up": True, "age_seconds": 1.0, "devices": [{"free_bytes": gpu_free}]}
    )
    return {
        "tiers": {
            "dram": {"slab_bytes": dram},
            "stores": {name: {"heat": value} for name, value in heat.items()},
        },
        "gpu": gpu,
    }


STORE_SPEC: dict[str, Any] = {
    "model": {"id": "builtin:smollm2-135m", "dtype": "float32"},
    "source": {"configMap": {"name": "facts"}},
}
MODEL_SPEC: dict[str, Any] = {
    "model": {"id": "builtin:smollm2-135m", "dtype": "float32"},
    "memoryStores": [{"name": "maya"}],
}


def jobs_of(world: World, owner: str) -> list[Manifest]:
    return world.of(owner, JOB.kind)
