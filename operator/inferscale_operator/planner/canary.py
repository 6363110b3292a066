"""What server pods say about the canary: how far injected answers are from text (pure).

Figures of a live server move with every prompt. A new one is taken over only when the verdict has
changed or the figure has moved by ``STEP``, so that a quiet cluster is written to rarely.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from inferscale_operator.desired.kinds import PERSONALIZED_MODEL, Manifest
from inferscale_operator.planner.conditions import Draft
from inferscale_operator.planner.plan import ChildKey

STEP = 0.05
"""Least change of a figure, in nats or as a share (arbitrary)."""
_STATES = ("degraded", "ok")
"""The worst first; ``unknown`` is no verdict."""


@dataclass(frozen=True, slots=True)
class StoreCanary:
    """One store in one pod.

    Attributes:
        state: ``degraded`` or ``ok``.
        kl: KL(text || injected) in nats.
        top1: Share of positions with the same most likely token.
        samples: Prompts behind the figures.
    """

    state: str
    kl: float
    top1: float
    samples: int

    @property
    def rank(self) -> tuple[bool, float]:
        """The worse, the larger."""
        return self.state == "degraded", self.kl


def read_canaries(document: Mapping[str, Any]) -> dict[str, StoreCanary]:
    """Verdicts in a pod's status document, by store; what is missing or wrong is no verdict."""
    stores = document.get("stores")
    found = {}
    for store in stores if isinstance(stores, list) else []:
        canary = store.get("canary") if isinstance(store, Mapping) else None
        if not isinstance(canary, Mapping) or canary.get("state") not in _STATES:
            continue
        kl, top1 = _number(canary.get("kl")), _number(canary.get("top1_agreement"))
        samples = _number(canary.get("samples"))
        name = store.get("name")
        if isinstance(name, str) and kl is not None and top1 is not None:
            found[name] = StoreCanary(str(canary["state"]), kl, min(1.0, top1), int(samples or 0))
    return found


def worst_canaries(documents: Iterable[Mapping[str, Any]]) -> dict[str, StoreCanary]:
    """The worst verdict on each store over all pods."""
    worst: dict[str, StoreCanary] = {}
    for document in documents:
        for name, canary in read_canaries(document).items():
            if name not in worst or canary.rank > worst[name].rank:
                worst[name] = canary
    return worst


def canary_status(
    old: Iterable[Manifest], worst: Mapping[str, StoreCanary], stores: Iterable[str]
) -> list[Manifest]:
    """``status.canary`` of a PersonalizedModel.

    Args:
        old: What it says now.
        worst: By store.
        stores: Names of its stores; what a pod says of others is left out.
    """
    before = {str(entry["name"]): entry for entry in old}
    entries = []
    for name in sorted({*stores} & worst.keys()):
        canary = worst[name]
        entry = {
            "name": name,
            "state": canary.state,
            "kl": round(canary.kl, 2),
            "top1Agreement": round(canary.top1, 2),
            "samples": canary.samples,
        }
        known = before.get(name)
        entries.append(known if known is not None and _alike(known, entry) else entry)
    return entries


def degraded_draft(entries: Iterable[Manifest]) -> Draft | None:
    """The condition ``Degraded`` of a PersonalizedModel; None while nothing is known."""
    found = list(entries)
    if not found:
        return None
    bad = [entry for entry in found if entry["state"] == "degraded"]
    if not bad:
        return Draft("Degraded", False, "CloseToText")
    return _degraded("; ".join(f"store '{entry['name']}': {_figures(entry)}" for entry in bad))


def store_degraded_draft(store: str, references: Mapping[ChildKey, Manifest]) -> Draft | None:
    """The condition ``Degraded`` of a MemoryStore; None while no model has a verdict.

    Args:
        store: Its name.
        references: With the PersonalizedModels that use it.
    """
    found = [
        (model, entry)
        for (kind, model), manifest in sorted(references.items())
        if kind == PERSONALIZED_MODEL.kind
        for entry in live_canary(manifest)
        if entry.get("name") == store
    ]
    if not found:
        return None
    bad = [f"model '{model}': {_figures(e)}" for model, e in found if e["state"] == "degraded"]
    return _degraded("; ".join(bad)) if bad else Draft("Degraded", False, "CloseToText")


def live_canary(model: Manifest) -> list[Manifest]:
    """``status.canary`` of a PersonalizedModel."""
    return list((model.get("status") or {}).get("canary") or [])


def canary_states(model: Manifest) -> dict[str, str]:
    """Verdict and figures of each store as one text, to see whether they have changed."""
    return {
        str(entry["name"]): f"{entry['state']} {_figures(entry)}" for entry in live_canary(model)
    }


def _degraded(what: str) -> Draft:
    message = (
        f"{what}; it is served as text meanwhile. Encode with another spec.encoding.policy, or "
        "change the limits in spec.canary of the PersonalizedModel"
    )
    return Draft("Degraded", True, "FarFromText", message, warning=True)


def _figures(entry: Manifest) -> str:
    return (
        f"KL {entry['kl']}, top-1 agreement {entry['top1Agreement']} over {entry['samples']} "
        "prompts"
    )


def _alike(old: Manifest, new: Manifest) -> bool:
    return old["state"] == new["state"] and all(
        abs(float(old[name]) - float(new[name])) < STEP for name in ("kl", "top1Agreement")
    )


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return float(value) if known else None
