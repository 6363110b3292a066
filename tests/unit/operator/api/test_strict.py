"""Manifests are refused without an API server as they are with one."""

from __future__ import annotations

import pytest
from tests.unit.operator.api.bounds import Case
from tests.unit.operator.api.cases import RULE_CASES
from tests.unit.operator.api.manifests import DELETE, FULL, Manifest, merged, model, store

from inferscale_operator.api.strict import find_problems


@pytest.mark.parametrize("manifest", [store(), model(), *FULL])
def test_a_good_manifest_has_no_problem(manifest: Manifest) -> None:
    assert find_problems(manifest) == []


@pytest.mark.parametrize("case", RULE_CASES, ids=lambda case: case.name)
def test_a_broken_rule_is_told_with_its_field(case: Case) -> None:
    (problem,) = find_problems(case.manifest)

    assert problem.startswith(case.path)
    assert case.words in problem
    assert "Value error" not in problem


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (store(sorce={}), "spec.sorce: unknown field; did you mean 'source'?"),
        (model(tiers={"dramm": "1Gi"}), "spec.tiers.dramm: unknown field; did you mean 'dram'?"),
        (model(zzz=1), "spec.zzz: unknown field"),
        (
            model(serving={"tolerations": [{"key": "a", "opertor": "Exists"}]}),
            "spec.serving.tolerations[0].opertor: unknown field; did you mean 'operator'?",
        ),
        (merged(store(), {"sepc": {}}), "sepc: unknown field; did you mean 'spec'?"),
        (merged(store(), {"apiVersion": "inferscale.dev/v1"}), "apiVersion: must be"),
        (merged(store(), {"metadata": {"name": DELETE}}), "metadata.name: is missing"),
        (merged(store(), {"kind": "Store"}), "kind: must be MemoryStore or PersonalizedModel"),
    ],
)
def test_a_slip_is_told(manifest: Manifest, problem: str) -> None:
    (found,) = find_problems(manifest)

    assert found.startswith(problem)


def test_maps_may_have_any_key() -> None:
    manifest = model(serving={"nodeSelector": {"example.com/pool": "a"}})
    labelled = merged(manifest, {"metadata": {"labels": {"team": "chat"}}})

    assert find_problems(labelled) == []


def test_several_problems_are_told_at_once_and_values_are_not_repeated() -> None:
    manifest = model(
        auth={"mode": "apiKey", "secretRef": {"name": "Not A Name"}}, retrieval={"topK": -1}
    )

    found = find_problems(manifest)

    assert [problem.partition(":")[0] for problem in found] == [
        "spec.retrieval.topK",
        "spec.auth.secretRef.name",
    ]
    assert "Not A Name" not in "".join(found)
