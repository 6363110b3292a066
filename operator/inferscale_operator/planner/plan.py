"""What a reconcile sees and what it decides; plain data, so that decisions can be tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.kinds import Kind, Manifest
from inferscale_operator.planner.load import PodLoad

__all__ = ["ChildKey", "Defaults", "EventRecord", "Observed", "Plan", "Ref"]

ChildKey = tuple[str, str]
"""(kind, name) of a child; the namespace is its owner's."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a decision may depend on, beside the custom resource itself.

    Attributes:
        now: Time of the observation, UTC.
        children: Live children of the resource by (kind, name).
        references: Objects that the spec names, by (kind, name): Secrets (keys only, values left
            out), ConfigMaps, claims, MemoryStores; for a MemoryStore also the PersonalizedModels
            that use it. A missing object is absent.
        pods: Pods of the resource's Jobs and Deployments; empty where the plan did not ask.
        reports: What pods said of themselves, by pod name.
        report_ages: Age in seconds of what a server pod said; what was said now is left out.
        loads: Load of ready server pods, by pod name, for models that are scaled.
        load_history: (seconds ago, requests) of the last looks at them.
        held: Requests that wait at the model's activator for a server.
        gpu_memory_bytes: Memory of the smallest GPU on the nodes that a PersonalizedModel's pods
            may run on; None when it asks for none, or when it is not known.
        optional_kinds: Names of the optional kinds that the cluster knows.
        namespace_terminating: Whether the namespace is being deleted.
        entropy: Fresh random text for a Secret that has to be made.
    """

    now: datetime
    children: Mapping[ChildKey, Manifest] = field(default_factory=dict)
    references: Mapping[ChildKey, Manifest] = field(default_factory=dict)
    pods: tuple[Manifest, ...] = ()
    reports: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    report_ages: Mapping[str, float] = field(default_factory=dict)
    loads: Mapping[str, PodLoad] = field(default_factory=dict)
    load_history: tuple[tuple[float, float], ...] = ()
    held: int = 0
    gpu_memory_bytes: int | None = None
    optional_kinds: frozenset[str] = frozenset()
    namespace_terminating: bool = False
    entropy: str = ""

    def find(self, kind: Kind, name: str) -> Manifest | None:
        """A live object by name, whether it is a child or one that the spec names."""
        key = (kind.kind, name)
        return self.children.get(key) or self.references.get(key)

    def of_kind(self, kind: Kind) -> list[Manifest]:
        """Live children of one kind, by name."""
        return [
            manifest for (name, _), manifest in sorted(self.children.items()) if name == kind.kind
        ]


@dataclass(frozen=True, slots=True)
class Ref:
    """An object to delete.

    Attributes:
        kind: Its kind.
        name: Its name.
        uid: Its uid: another object of the same name is left alone.
    """

    kind: Kind
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An Event on the custom resource.

    Attributes:
        type: ``Normal`` or ``Warning``.
        reason: CamelCase word.
        message: Sentence without fact text.
    """

    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now; carried out in the order of the fields.

    Attributes:
        finalizer: True: must be there; False: must be gone; None: as it is.
        create: Objects that are made once and never changed (Jobs, generated Secrets).
        apply: Objects to keep as they are here, by server-side apply.
        delete: Objects to delete.
        pod_costs: Pods to mark with what it costs to delete them, by name; as far as allowed.
        status: Whole ``status``; written only where it differs. None: as it is.
        replicas: Size to write through the scale subresource; None: as it is.
        events: To be posted after the status was written.
        requeue_seconds: When to look again without an event; None leaves it to the resync.
    """

    finalizer: bool | None = None
    create: tuple[Manifest, ...] = ()
    apply: tuple[Manifest, ...] = ()
    delete: tuple[Ref, ...] = ()
    pod_costs: Mapping[str, int] = field(default_factory=dict)
    status: Manifest | None = None
    replicas: int | None = None
    events: tuple[EventRecord, ...] = ()
    requeue_seconds: float | None = None


def earliest(*seconds: float | None) -> float | None:
    """The soonest of several times to look again; None only if all are."""
    known = [value for value in seconds if value is not None]
    return min(known) if known else None
