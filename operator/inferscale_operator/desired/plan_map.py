"""The ConfigMap of the tier plan: what the pods follow, and what the next plan starts from."""

from __future__ import annotations

from inferscale_operator.desired import naming
from inferscale_operator.desired.kinds import CONFIG_MAP, Manifest
from inferscale_operator.desired.selection import COMPONENT

PLAN_KEY = "plan.json"
"""The document that the pods read; the only key that is mounted."""
GRANTS_KEY = "grants.json"
"""What each store was given and why: the next plan keeps to it where it can."""


def plan_name(owner: naming.Owner) -> str:
    """Name of the ConfigMap; not part of any generation."""
    return f"{owner['metadata']['name']}-plan"


def build_plan_map(owner: naming.Owner, plan: str, grants: str) -> Manifest:
    """The ConfigMap.

    Args:
        owner: The PersonalizedModel.
        plan: The runtime's ``TierPlan`` as JSON.
        grants: The planner's own document.
    """
    data = {PLAN_KEY: plan, GRANTS_KEY: grants}
    return naming.child(CONFIG_MAP, owner, plan_name(owner), COMPONENT, {"data": data})
