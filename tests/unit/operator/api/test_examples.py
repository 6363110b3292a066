"""Examples are read by the models, and the quick start has the sample memory of the project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from inferscale_operator.api.crds import DEFINITIONS

ROOT = Path(__file__).parents[4]
SAMPLE = ROOT / "runtime/inferscale_runtime/demo/sample.jsonl"
MODELS = {definition.model.__name__: definition.model for definition in DEFINITIONS}
FILES = sorted((ROOT / "examples").rglob("*.yaml"))


def _documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_example_is_read_by_the_models(file: Path) -> None:
    own = [document for document in _documents(file) if document["kind"] in MODELS]

    assert own
    for document in own:
        MODELS[document["kind"]].model_validate(document)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_example_is_in_the_index(file: Path) -> None:
    name = file.relative_to(ROOT / "examples").as_posix()
    assert f"]({name})" in (ROOT / "examples/README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_model_is_the_one_of_its_stores(file: Path) -> None:
    documents = _documents(file)
    stores = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "MemoryStore"}
    for served in (d["spec"] for d in documents if d["kind"] == "PersonalizedModel"):
        for name in (entry["name"] for entry in served["memoryStores"] if stores):
            for field in ("id", "revision", "dtype"):
                assert stores[name]["model"].get(field) == served["model"].get(field)


def test_the_quick_start_has_the_sample_memory() -> None:
    documents = {d["kind"]: d for d in _documents(ROOT / "examples/quickstart.yaml")}
    text = documents["ConfigMap"]["data"]["facts.jsonl"]
    source = documents["MemoryStore"]["spec"]["source"]["configMap"]["name"]

    assert text == SAMPLE.read_text(encoding="utf-8")
    assert source == documents["ConfigMap"]["metadata"]["name"]
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["user"] for line in lines} == {"maya"}
    assert sum(line["kind"] == "fact" for line in lines) == 76
