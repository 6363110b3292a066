"""The models refuse by themselves what the API server refuses."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from tests.unit.operator.api.bounds import Case, bound_cases
from tests.unit.operator.api.cases import CHANGES, RULE_CASES
from tests.unit.operator.api.manifests import FULL, model, store

from inferscale_operator.api.crds import DEFINITIONS, resource_schema
from inferscale_operator.api.rules import RULES

MODELS = {definition.model.__name__: definition.model for definition in DEFINITIONS}
CASES = [*bound_cases(), *RULE_CASES]


def _paths(error: ValidationError) -> list[str]:
    return [
        "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in problem["loc"]).lstrip(".")
        for problem in error.errors()
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_manifest_is_refused_by_field(case: Case) -> None:
    with pytest.raises(ValidationError) as caught:
        MODELS[case.manifest["kind"]].model_validate(case.manifest)

    assert case.words in str(caught.value)
    assert any(path.startswith(case.path) for path in _paths(caught.value))


@pytest.mark.parametrize("manifest", [store(), model(), *FULL])
def test_a_good_manifest_is_read(manifest: dict[str, Any]) -> None:
    MODELS[manifest["kind"]].model_validate(manifest)


def _messages(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(_messages, node), set())
    if not isinstance(node, dict):
        return set()
    own = {rule["message"] for rule in node.get(RULES, ())}
    return own.union(*map(_messages, node.values()), set())


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.plural)
def test_each_rule_has_a_case(definition: Any) -> None:
    words = [case.words for case in RULE_CASES if case.words] + [change[3] for change in CHANGES]

    untested = {
        message
        for message in _messages(resource_schema(definition))
        # Rules of map keys are made from bounds: each map has a case among the bounds.
        if not message.startswith("keys must") and not any(part in message for part in words)
    }

    assert untested == set()


def _fields(node: dict[str, Any], path: str = "") -> set[str]:
    found = set()
    for name, part in node.get("properties", {}).items():
        found |= {f"{path}.{name}"} | _fields(part, f"{path}.{name}")
    return found | (_fields(node["items"], path) if "items" in node else set())


def _given(value: Any, path: str = "") -> set[str]:
    if isinstance(value, list):
        return set().union(*(_given(item, path) for item in value), set())
    if not isinstance(value, dict):
        return set()
    found = set()
    for name, part in value.items():
        found |= {f"{path}.{name}"} | _given(part, f"{path}.{name}")
    return found


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.plural)
def test_the_full_manifests_have_every_field(definition: Any) -> None:
    spec = resource_schema(definition)["properties"]["spec"]
    given = set().union(
        *(_given(full["spec"]) for full in FULL if full["kind"] == definition.model.__name__)
    )

    assert _fields(spec) - given == set()
