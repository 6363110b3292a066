from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from inferscale_operator.local.documents import (
    DocumentError,
    existing_claims,
    moved_store,
    read_documents,
)

EXAMPLES = Path(__file__).parents[4] / "examples"

STORE: dict[str, Any] = {
    "apiVersion": "inferscale.dev/v1alpha1",
    "kind": "MemoryStore",
    "metadata": {"name": "facts"},
    "spec": {
        "model": {"id": "builtin:smollm2-135m"},
        "source": {"configMap": {"name": "facts"}},
        "storage": {"pvc": {"size": "1Gi"}},
    },
}
MODEL: dict[str, Any] = {
    "apiVersion": "inferscale.dev/v1alpha1",
    "kind": "PersonalizedModel",
    "metadata": {"name": "chat"},
    "spec": {"model": {"id": "builtin:smollm2-135m"}, "memoryStores": [{"name": "facts"}]},
}


def text(*documents: Any) -> str:
    return yaml.safe_dump_all(documents)


def changed(document: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {**document, "spec": {**document["spec"], **spec}}


def problems(content: str, file: str = "f.yaml") -> list[str]:
    with pytest.raises(DocumentError) as raised:
        read_documents({file: content})
    return raised.value.problems


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_read(path: Path) -> None:
    kinds = {"MemoryStore", "PersonalizedModel", "ConfigMap", "Secret"}
    content = path.read_text()
    foreign = [d for d in yaml.safe_load_all(content) if d and d["kind"] not in kinds]
    if foreign:
        assert f"kind '{foreign[0]['kind']}'" in problems(content)[0]
    else:
        assert read_documents({path.name: content})


def test_defaults_are_written_out_and_a_namespace_is_given() -> None:
    (store,) = read_documents({"f": text(STORE)})
    assert store["metadata"] == {"name": "facts", "namespace": "default"}
    assert store["spec"]["encoding"]["policy"] == "neighbours:10"
    assert store["spec"]["job"]["parallelism"] == 1
    assert "s3" not in store["spec"]["storage"], "what is absent stays absent"
    assert read_documents({"f": text(store)}) == [store], "reading it again changes nothing"


def test_what_others_need_comes_first_whatever_the_order_in_the_files() -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s"},
        "stringData": {"api-key": "top"},
    }
    found = read_documents({"a": text(MODEL, STORE), "b": text(None, secret)})
    assert [item["kind"] for item in found] == ["Secret", "MemoryStore", "PersonalizedModel"]
    assert found[0]["data"] == {"api-key": "dG9w"}
    assert "stringData" not in found[0]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("a: [", ["f.yaml: not YAML", "line 1"]),
        ("- 1", ["document 1", "(a list)"]),
        ("", ["no document"]),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}",
            ["document 1", "'Deployment'", "'apps/v1'", "MemoryStore"],
        ),
        (text({**STORE, "apiVersion": "inferscale.dev/v1"}), ["'inferscale.dev/v1'"]),
        (text({**STORE, "metadata": {}}), ["metadata.name is missing"]),
        (text({**STORE, "metadata": {"name": "x" * 41}}), ["at most 40 characters"]),
        (text({**STORE, "metadata": {"name": "A"}}), ["name 'A'"]),
        (text({**STORE, "extra": 1}), ["field 'extra' is unknown"]),
        (text({k: v for k, v in STORE.items() if k != "spec"}), ["spec.model is missing"]),
        (text(STORE, STORE), ["document 2", "document 1"]),
        (text(changed(STORE, suspended=True)), ["spec.suspended is unknown", "suspend"]),
        (text(changed(STORE, job={"paralelism": 2})), ["spec.job.paralelism is unknown"]),
        (text(changed(STORE, job={"parallelism": "2"})), ["spec.job.parallelism '2'"]),
        (text(changed(STORE, job={"parallelism": 0})), ["spec.job.parallelism 0", "1"]),
        (text(changed(STORE, source={})), ["spec.source (a map)", "exactly one"]),
        (text(changed(MODEL, memoryStores=[{"nam": "f"}])), ["spec.memoryStores[0].nam is"]),
        (
            text(changed(MODEL, serving={"tolerations": [{"oprator": "Exists"}]})),
            ["spec.serving.tolerations[0].oprator is unknown"],
        ),
        (
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: 1}",
            ["ConfigMap/c", "data.a is not a text"],
        ),
    ],
)
def test_what_is_wrong_is_named(content: str, parts: list[str]) -> None:
    found = problems(content)
    assert found[0].startswith("f.yaml")
    for part in parts:
        assert part in "\n".join(found)


def test_all_problems_of_all_files_are_told_at_once() -> None:
    bad = changed(STORE, job={"parallelism": 0, "backoffLimit": -1}, more=1)
    with pytest.raises(DocumentError) as raised:
        read_documents({"a": text(bad), "b": "[", "c": text(MODEL)})
    found = raised.value.problems
    assert len(found) == 4
    assert {line.split(":")[0] for line in found} == {"a", "b"}


def test_a_value_of_a_secret_is_in_no_message() -> None:
    content = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\nstringData: {k: 12345}"
    assert "12345" not in "".join(problems(content))


def test_a_store_cannot_be_moved() -> None:
    (live,) = read_documents({"f": text(STORE)})
    (grown,) = read_documents({"f": text(changed(STORE, storage={"pvc": {"size": "2Gi"}}))})
    (moved,) = read_documents({"f": text(changed(STORE, storage={"pvc": {"claimName": "c"}}))})
    assert moved_store(None, live) is None
    assert moved_store(live, grown) is None
    assert "spec.storage" in (moved_store(live, moved) or "")


def test_existing_claims_of_a_spec() -> None:
    source = {"pvc": {"claimName": "facts"}}
    storage = {"pvc": {"claimName": "store"}}
    (store,) = read_documents({"f": text(changed(STORE, source=source, storage=storage))})
    assert dict(existing_claims(store)) == {
        "spec.source.pvc.claimName": "facts",
        "spec.storage.pvc.claimName": "store",
    }
