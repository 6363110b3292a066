"""The two kinds on a real API server: what is stored, what is refused, and what kubectl shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kube.control_plane import ROOT, ControlPlane, Kubectl, KubectlError
from tests.unit.operator.api.bounds import Case, bound_cases
from tests.unit.operator.api.cases import ALLOWED_CHANGES, CHANGES, RULE_CASES
from tests.unit.operator.api.manifests import DELETE, FULL, Manifest, merged, model, store

from inferscale_operator.api.base import GROUP
from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.api.rules import Struct

CASES = [*bound_cases(), *RULE_CASES]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


@pytest.fixture(scope="module")
def refusals(control_plane: ControlPlane) -> dict[str, str]:
    """What the API server says about each case, by its name; accepted cases are absent."""
    said: dict[str, str] = {}
    for start in range(0, len(CASES), 100):
        part = {f"c{start + n}": case for n, case in enumerate(CASES[start : start + 100])}
        documents = [_labelled(case, label) for label, case in part.items()]
        text = yaml.safe_dump_all(documents)
        try:
            control_plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=text)
        except KubectlError as error:
            # kubectl writes one paragraph for each refused object, with the object's name in it.
            for paragraph in re.split(r"\n(?=The |Error from)", str(error)):
                for name in re.findall(r'"([^"]+)" is invalid', paragraph):
                    said[part[name].name if name in part else name] = paragraph
    return said


def _labelled(case: Case, label: str) -> Manifest:
    if "metadata" in f"{case.path} {case.words}":
        return case.manifest
    return merged(case.manifest, {"metadata": {"name": label}})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_manifest_is_refused_by_field(refusals: dict[str, str], case: Case) -> None:
    said = refusals.get(case.name) or refusals.get(case.manifest["metadata"]["name"], "accepted")

    assert case.path in said
    assert case.words in said


@pytest.mark.parametrize("manifest", [store(), model(), *FULL])
def test_a_good_manifest_is_accepted(kubectl: Kubectl, manifest: Manifest) -> None:
    kubectl("create", "--validate=strict", "-f", "-", stdin=json.dumps(manifest))


def _defaults(spec: type[Struct], given: Manifest) -> Manifest:
    """What the models fill in; lists, maps and parts that hold nothing are not stored."""
    full = spec.model_validate(given).model_dump(mode="json", by_alias=True, exclude_none=True)
    return _without_empty(full)


def _without_empty(value: Manifest) -> Manifest:
    parts = {k: _without_empty(v) if isinstance(v, dict) else v for k, v in value.items()}
    return {k: v for k, v in parts.items() if v not in ({}, [])}


@pytest.mark.parametrize(
    ("manifest", "spec"),
    [(store(), MemoryStoreSpec), (model(), PersonalizedModelSpec)],
    ids=["store", "model"],
)
def test_defaults_are_visible(kubectl: Kubectl, manifest: Manifest, spec: type[Struct]) -> None:
    answer = kubectl("create", "-o", "json", "-f", "-", stdin=json.dumps(manifest))
    stored = json.loads(answer)

    assert stored["spec"] == _defaults(spec, manifest["spec"])
    assert "status" not in stored


def test_defaults_of_the_documents() -> None:
    """The values that pages and examples speak of; a change is a change of the API."""
    memory = _defaults(MemoryStoreSpec, store()["spec"])
    served = _defaults(PersonalizedModelSpec, model()["spec"])

    assert memory["storage"] == {"pvc": {"size": "10Gi", "accessMode": "ReadWriteOnce"}}
    assert memory["encoding"] == {
        "policy": "neighbours:10",
        "embedder": "minilm",
        "kvDtype": "auto",
    }
    assert memory["retention"] == {"onDelete": "Erase"}
    assert served["retrieval"]["topK"] == 20
    assert served["serving"]["replicas"] == 1
    assert served["auth"] == {"mode": "none", "audit": "None", "limits": {"burst": 20}}


@pytest.mark.parametrize("manifest", [store(extra=1), model(tiers={"dramm": "1Gi"})])
def test_an_unknown_field_is_refused(kubectl: Kubectl, manifest: Manifest) -> None:
    with pytest.raises(KubectlError, match=r'unknown field "spec\.(extra|tiers\.dramm)"'):
        kubectl("apply", "--validate=strict", "-f", "-", stdin=json.dumps(manifest))


def test_an_unknown_field_is_pruned_without_validation(kubectl: Kubectl) -> None:
    kubectl("create", "--validate=false", "-f", "-", stdin=json.dumps(store(extra=1)))

    assert "extra" not in json.loads(kubectl("get", "mstore", "s", "-o", "json"))["spec"]


def _null(patch: Any) -> Any:
    if isinstance(patch, dict):
        return {key: _null(value) for key, value in patch.items()}
    return None if patch is DELETE else patch


def _patch(kubectl: Kubectl, patch: Manifest) -> str:
    return kubectl("patch", "mstore", "s", "--type=merge", "-p", json.dumps({"spec": _null(patch)}))


@pytest.mark.parametrize(("what", "before", "patch", "words"), CHANGES, ids=[c[0] for c in CHANGES])
def test_the_place_of_a_store_stays(
    kubectl: Kubectl, what: str, before: Manifest, patch: Manifest, words: str
) -> None:
    kubectl("create", "-f", "-", stdin=json.dumps(store(**before)))

    with pytest.raises(KubectlError, match=rf"spec\.storage.*{words}"):
        _patch(kubectl, patch)


@pytest.mark.parametrize(("what", "patch"), ALLOWED_CHANGES, ids=[c[0] for c in ALLOWED_CHANGES])
def test_the_rest_of_a_store_may_change(kubectl: Kubectl, what: str, patch: Manifest) -> None:
    kubectl("create", "-f", "-", stdin=json.dumps(store()))
    _patch(kubectl, patch)

    stored = json.loads(kubectl("get", "mstore", "s", "-o", "json"))
    assert stored["metadata"]["generation"] == 2


def _set_status(kubectl: Kubectl, kind: str, name: str, status: Manifest) -> None:
    patch = json.dumps({"status": status})
    kubectl("patch", kind, name, "--subresource=status", "--type=merge", "-p", patch)


READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Encoded",
    "message": "All facts have KV.",
    "observedGeneration": 1,
    "lastTransitionTime": "2026-01-02T03:04:05Z",
}


def _table(text: str) -> dict[str, str]:
    """Heading -> cell of a table with one row."""
    head, row = (re.split(r"\s{2,}", line.strip()) for line in text.strip().splitlines())
    return dict(zip(head, row, strict=True))


def test_columns_of_a_store(kubectl: Kubectl) -> None:
    kubectl("create", "-f", "-", stdin=json.dumps(store()))
    status = {"conditions": [READY], "facts": {"summary": "3/4"}, "tier": "disk", "storeBytes": 512}
    _set_status(kubectl, "mstore", "s", {**status, "fingerprint": "f00d"})

    narrow = _table(kubectl("get", "memorystores"))
    wide = _table(kubectl("get", "mstore", "-o", "wide"))

    assert narrow.pop("AGE")
    assert narrow == {
        "NAME": "s",
        "READY": "True",
        "REASON": "Encoded",
        "MODEL": "org/model",
        "FACTS": "3/4",
        "TIER": "disk",
        "BYTES": "512",
    }
    assert (wide["MESSAGE"], wide["FINGERPRINT"]) == ("All facts have KV.", "f00d")


def test_columns_of_a_model(kubectl: Kubectl) -> None:
    kubectl("create", "-f", "-", stdin=json.dumps(model()))
    status = {"conditions": [READY], "facts": {"summary": "9/9"}, "tier": "dram 1Gi", "replicas": 2}
    serving = {"name": "m-abc", "hash": "abc"}
    _set_status(kubectl, "pmodel", "m", {**status, "endpoint": "http://m", "serving": serving})

    narrow = _table(kubectl("get", "pmodel"))
    wide = _table(kubectl("get", "pmodel", "-o", "wide"))

    assert narrow.pop("AGE")
    assert narrow == {
        "NAME": "m",
        "READY": "True",
        "REASON": "Encoded",
        "MODEL": "org/model",
        "FACTS": "9/9",
        "TIER": "dram 1Gi",
        "REPLICAS": "2",
    }
    assert (wide["ENDPOINT"], wide["GENERATION"]) == ("http://m", "abc")


def test_the_category_lists_both_kinds(kubectl: Kubectl) -> None:
    kubectl("create", "-f", "-", stdin=json.dumps(store()))
    kubectl("create", "-f", "-", stdin=json.dumps(model()))

    names = kubectl("get", "inferscale", "-o", "name").split()
    assert names == [f"memorystore.{GROUP}/s", f"personalizedmodel.{GROUP}/m"]


def test_status_and_spec_are_written_apart(kubectl: Kubectl) -> None:
    kubectl("create", "-f", "-", stdin=json.dumps({**store(), "status": {"tier": "disk"}}))
    assert "status" not in json.loads(kubectl("get", "mstore", "s", "-o", "json"))

    patch = json.dumps({"status": {"tier": "disk"}, "spec": {"suspend": True}})
    kubectl("patch", "mstore", "s", "--subresource=status", "--type=merge", "-p", patch)
    stored = json.loads(kubectl("get", "mstore", "s", "-o", "json"))
    assert (stored["status"], stored["spec"]["suspend"]) == ({"tier": "disk"}, False)
    assert stored["metadata"]["generation"] == 1


def test_a_condition_without_reason_is_refused(kubectl: Kubectl) -> None:
    kubectl("create", "-f", "-", stdin=json.dumps(store()))
    condition = {key: value for key, value in READY.items() if key != "reason"}

    with pytest.raises(KubectlError, match=r"status\.conditions\[0\]\.reason: Required value"):
        _set_status(kubectl, "mstore", "s", {"conditions": [condition]})


def test_a_model_scales(kubectl: Kubectl) -> None:
    kubectl("create", "-f", "-", stdin=json.dumps(model()))
    _set_status(kubectl, "pmodel", "m", {"replicas": 1, "selector": "inferscale.dev/owner=m"})
    kubectl("scale", "pmodel/m", "--replicas=3")

    scale = json.loads(kubectl("get", "pmodel", "m", "--subresource=scale", "-o", "json"))
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == {"replicas": 1, "selector": "inferscale.dev/owner=m"}
    with pytest.raises(KubectlError, match=r"spec\.serving\.replicas.*1000"):
        kubectl("scale", "pmodel/m", "--replicas=1001")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("memorystore.spec.encoding.policy", "neighbours:N"),
        ("personalizedmodel.spec.serving.engineArgs", "vLLM"),
        ("personalizedmodel.spec.tiers.dram", "shared-memory arena"),
    ],
)
def test_fields_are_explained(kubectl: Kubectl, path: str, words: str) -> None:
    assert words in " ".join(kubectl("explain", path).split())


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_is_accepted(kubectl: Kubectl, file: Path) -> None:
    for way in ((), ("--server-side",)):
        kubectl("apply", *way, "--dry-run=server", "--validate=strict", "-f", str(file))


def test_there_are_examples() -> None:
    assert {file.name for file in EXAMPLES} >= {"minimal.yaml", "quickstart.yaml"}
