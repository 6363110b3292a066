"""PodDisruptionBudget and spreading of server pods."""

from __future__ import annotations

from collections.abc import Sequence

from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired import naming
from inferscale_operator.desired.kinds import DISRUPTION_BUDGET, Manifest
from inferscale_operator.desired.selection import COMPONENT, generation_selector
from inferscale_operator.desired.stores import StoreView, on_one_node

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
    owner: naming.Owner,
    spec: PersonalizedModelSpec,
    stores: Sequence[StoreView],
    generation: str,
) -> list[Manifest]:
    """How pods are spread; a wish, so that a small cluster still runs them all.

    There is none over nodes when a store lies in a volume that one node can mount: spreading would
    send pods to nodes on which they wait for it for ever.
    """
    key = TOPOLOGY_KEYS.get(spec.serving.spread)
    if key is None or any(on_one_node(store.spec) for store in stores):
        return []
    return [
        {
            "labelSelector": {"matchLabels": generation_selector(owner, generation)},
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
        }
    ]
