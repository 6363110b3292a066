"""A spec that cannot be read: older objects, or rules that the API server could not check."""

from __future__ import annotations

from pydantic import ValidationError

from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.planner.conditions import Draft, merge_conditions, transition_events
from inferscale_operator.planner.plan import Observed, Plan
from inferscale_runtime.budget import ConfigError


def describe(error: ValidationError | ConfigError) -> str:
    """The first problem: path, value and what is wrong with it."""
    if isinstance(error, ConfigError):
        return str(error)
    first = error.errors(include_url=False)[0]
    path = ".".join(["spec", *(str(part) for part in first["loc"])])
    value = first.get("input")
    shown = f" {value!r}" if isinstance(value, str | int | float | bool) else ""
    return f"{path}{shown:.80}: {first['msg']}"


def plan_invalid(
    resource: Manifest, observed: Observed, error: ValidationError | ConfigError
) -> Plan:
    """Says what is wrong and touches nothing else: children of the last valid spec stay."""
    old = resource.get("status", {})
    generation = resource["metadata"].get("generation", 0)
    drafts = [Draft("Ready", False, "InvalidSpec", describe(error), warning=True)]
    kept = [item for item in old.get("conditions", []) if item["type"] != "Ready"]
    conditions = merge_conditions(old.get("conditions", []), drafts, generation, observed.now)
    status = {**old, "observedGeneration": generation, "conditions": [*kept, *conditions]}
    before = {item["type"]: item.get("reason") for item in old.get("conditions", [])}
    changed = before.get("Ready") != "InvalidSpec"
    renamed = [Draft("Spec", False, "InvalidSpec", drafts[0].message, warning=True)]
    return Plan(status=status, events=transition_events([], renamed) if changed else ())
