"""Whether the stores of a PersonalizedModel can be served by it."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.kinds import MEMORY_STORE, Manifest
from inferscale_operator.desired.stores import StoreView, embedder_conflict, s3_conflict
from inferscale_operator.planner.conditions import Draft
from inferscale_operator.planner.plan import Observed
from inferscale_operator.planner.run_input import model_key


@dataclass(frozen=True, slots=True)
class Stores:
    """What the stores allow.

    Attributes:
        views: The stores that can be served, in order of the spec.
        drafts: ``StoresReady`` and ``Compatible``.
        usable: Whether a generation can be made of them.
        gone: Whether no store is left at all: nothing may be served then.
    """

    views: tuple[StoreView, ...]
    drafts: tuple[Draft, ...]
    usable: bool
    gone: bool


def check_stores(
    spec: PersonalizedModelSpec, observed: Observed, budget: Draft | None = None
) -> Stores:
    """Looks at every store that the spec names.

    A store that is missing or being deleted is left out of what is served, at once: that is what
    deleting it means. A store that is not encoded yet holds the new generation back, and what
    serves now goes on.

    Args:
        spec: Of the PersonalizedModel.
        observed: What was seen.
        budget: Why memory does not suffice, as condition ``Compatible``, or None.
    """
    views: list[StoreView] = []
    absent: list[str] = []
    waiting: Draft | None = None
    incompatible: Draft | None = None
    for index, ref in enumerate(spec.memory_stores):
        live = observed.references.get((MEMORY_STORE.kind, ref.name))
        if live is None or live["metadata"].get("deletionTimestamp"):
            absent.append(ref.name)
            continue
        try:
            store = MemoryStoreSpec.model_validate(live.get("spec", {}))
        except ValidationError:
            waiting = waiting or Draft(
                "StoresReady", False, "StoreInvalid", f"MemoryStore '{ref.name}' is not valid"
            )
            continue
        field = f"spec.memoryStores[{index}]"
        incompatible = incompatible or _mismatch(field, spec, ref.name, store, live)
        status = live.get("status", {})
        if status.get("encodedModel") != model_key(spec.model) or not status.get("fingerprint"):
            waiting = waiting or _not_encoded(ref.name, live)
            continue
        views.append(StoreView(ref.name, store, str(status["fingerprint"])))
    gone = len(absent) == len(spec.memory_stores)
    incompatible = incompatible or _conflict(views) or budget
    usable = waiting is None and incompatible is None and bool(views)
    drafts = (
        _stores_ready(absent, waiting),
        incompatible or Draft("Compatible", True, "Compatible"),
    )
    return Stores(tuple(views), drafts, usable, gone)


def _conflict(views: list[StoreView]) -> Draft | None:
    """Stores that one pod cannot use together."""
    places = [
        (f"MemoryStore '{view.name}' spec.storage.s3", view.spec.storage.s3) for view in views
    ]
    message = s3_conflict(places) or embedder_conflict(views)
    return Draft("Compatible", False, "StoresConflict", message, warning=True) if message else None


def _stores_ready(absent: list[str], waiting: Draft | None) -> Draft:
    if absent:
        names = ", ".join(f"'{name}'" for name in absent)
        message = (
            f"spec.memoryStores: MemoryStore {names} does not exist; create it or remove it here"
        )
        return Draft("StoresReady", False, "StoreMissing", message, warning=True)
    return waiting or Draft("StoresReady", True, "Encoded")


def _not_encoded(name: str, live: Manifest) -> Draft:
    conditions = {item["type"]: item for item in live.get("status", {}).get("conditions", [])}
    why = conditions.get("Encoded", {}).get("message") or "its encoding has not begun"
    return Draft("StoresReady", False, "WaitingForEncoding", f"MemoryStore '{name}': {why}")


def _mismatch(
    field: str, spec: PersonalizedModelSpec, name: str, store: MemoryStoreSpec, live: Manifest
) -> Draft | None:
    for label, here, there in (
        ("id", spec.model.id, store.model.id),
        ("revision", spec.model.revision, store.model.revision),
        ("dtype", spec.model.dtype, store.model.dtype),
    ):
        if here != there:
            message = (
                f"{field}: MemoryStore '{name}' is encoded for spec.model.{label} '{there}', not "
                f"'{here}'; make both the same"
            )
            return Draft("Compatible", False, "OtherModel", message, warning=True)
    heads = int(live.get("status", {}).get("modelShape", {}).get("numKvHeads", 0))
    size = spec.serving.tensor_parallel_size
    if heads and heads % size:
        message = (
            f"spec.serving.tensorParallelSize {size} does not divide the model's {heads} KV heads; "
            f"use a divisor of {heads}"
        )
        return Draft("Compatible", False, "TensorParallelSize", message, warning=True)
    return None


def count_facts(spec: PersonalizedModelSpec, observed: Observed) -> Manifest:
    """``status.facts``: sums over the stores that exist."""
    sums = dict.fromkeys(("users", "total", "encoded"), 0)
    for ref in spec.memory_stores:
        live = observed.references.get((MEMORY_STORE.kind, ref.name), {})
        facts = live.get("status", {}).get("facts", {})
        sums = {name: value + int(facts.get(name, 0)) for name, value in sums.items()}
    return {**sums, "summary": f"{sums['encoded']}/{sums['total']}"}
