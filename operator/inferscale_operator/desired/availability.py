"""PodDisruptionBudget and spreading of server pods."""

from __future__ import annotations

from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired import naming
from inferscale_operator.desired.kinds import DISRUPTION_BUDGET, Manifest
from inferscale_operator.desired.selection import COMPONENT, generation_selector

TOPOLOGY_KEYS = {"Node": "kubernetes.io/hostname", "Zone": "topology.kubernetes.io/zone"}


def build_disruption_budget(
    owner: naming.Owner, spec: PersonalizedModelSpec, generation: str
) -> Manifest | None:
    """The budget of the serving generation.

    With one replica there is none: it would either forbid every node drain or allow what happens
    anyway.

    Args:
        owner: The PersonalizedModel.
        spec: Its spec.
        generation: The generation that serves.
    """
    if spec.serving.replicas < 2:
        return None
    body = {
        "maxUnavailable": spec.disruption.max_unavailable,
        "selector": {"matchLabels": generation_selector(owner, generation)},
        # A server that never became ready must not keep a node from being drained.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    name = owner["metadata"]["name"]
    return naming.child(DISRUPTION_BUDGET, owner, name, COMPONENT, {"spec": body})


def spread_constraints(
    owner: naming.Owner, spec: PersonalizedModelSpec, generation: str
) -> list[Manifest]:
    """How pods are spread; a wish, so that a small cluster still runs them all."""
    key = TOPOLOGY_KEYS.get(spec.serving.spread)
    if key is None:
        return []
    return [
        {
            "labelSelector": {"matchLabels": generation_selector(owner, generation)},
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
        }
    ]
