"""What every manifest must be: valid for each Kubernetes release, restricted, complete."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_operator.desired import naming
from inferscale_operator.desired.kinds import CHILD_KINDS, kind_of
from inferscale_operator.planner.drift import differs

Build = Callable[[dict[str, Any]], list[dict[str, Any]]]

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36")
WITHOUT_SCHEMA = {"ScaledObject", "PodMonitor"}
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")

names = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)


def _pods(manifests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for manifest in manifests:
        template = manifest.get("spec", {}).get("template")
        if template is not None:
            yield template


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_fit_the_schema_of(version: str, case: dict[str, Any], build: Build) -> None:
    for manifest in build(case):
        if manifest["kind"] not in WITHOUT_SCHEMA:
            assert kubernetes_validate.validate(manifest, version, strict=True) == version


def test_the_schemas_refuse_what_is_wrong(build: Build, case: dict[str, Any]) -> None:
    manifest = next(m for m in build(case) if m["kind"] in ("Job", "Deployment"))
    manifest["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)


def test_pods_are_restricted(case: dict[str, Any], build: Build) -> None:
    pods = list(_pods(build(case)))
    assert pods
    for template in pods:
        spec = template["spec"]
        # Routers look for pods, activators write one size; nobody else calls the API server.
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        token = component in ("router", "activator")
        assert spec["automountServiceAccountToken"] is token
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 1000
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in spec["volumes"]:
            kinds = volume.keys() - {"name"}
            assert kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True
            assert "hostPort" not in str(container["ports"] if "ports" in container else "")


def test_mounts_have_volumes_and_volumes_mounts(case: dict[str, Any], build: Build) -> None:
    for template in _pods(build(case)):
        volumes = [volume["name"] for volume in template["spec"]["volumes"]]
        assert len(set(volumes)) == len(volumes)
        (container,) = template["spec"]["containers"]
        mounts = container["volumeMounts"]
        assert sorted(mount["name"] for mount in mounts) == sorted(volumes)
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        assert all(LABEL.fullmatch(name) for name in volumes)


def test_variables_in_arguments_are_defined(case: dict[str, Any], build: Build) -> None:
    for template in _pods(build(case)):
        (container,) = template["spec"]["containers"]
        defined = {variable["name"] for variable in container["env"]}
        assert len(defined) == len(container["env"])
        text = " ".join(container["args"]).replace("$$", "")
        assert set(re.findall(r"\$\((.*?)\)", text)) <= defined
        programs = ("inferscale", "inferscale-operator", "vllm-router")
        assert container["command"][0] in programs


def test_secrets_and_settings_are_read_only(case: dict[str, Any], build: Build) -> None:
    for template in _pods(build(case)):
        given = {
            v["name"] for v in template["spec"]["volumes"] if v.keys() & {"configMap", "secret"}
        }
        (container,) = template["spec"]["containers"]
        for mount in container["volumeMounts"]:
            assert mount.get("readOnly", False) or mount["name"] not in given


def test_selectors_choose_the_own_pods(case: dict[str, Any], build: Build) -> None:
    manifests = build(case)
    deployments = [m for m in manifests if m["kind"] == "Deployment"]
    pods = [item["spec"]["template"]["metadata"]["labels"] for item in deployments]
    for manifest in manifests if pods else ():
        if "selector" not in manifest.get("spec", {}):
            continue
        selector = manifest["spec"]["selector"]
        wanted = selector.get("matchLabels", selector).items()
        chosen = [labels for labels in pods if wanted <= labels.items()]
        # Routers and servers are never chosen together.
        assert len(chosen) == 1, manifest["metadata"]["name"]
        if manifest in deployments:
            assert chosen == [manifest["spec"]["template"]["metadata"]["labels"]]


def test_nothing_is_written_that_reading_back_would_lose(
    case: dict[str, Any], build: Build
) -> None:
    """The API server drops empty lists, maps and strings, and a difference would never end."""

    def empty(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                # The core API group has an empty name, which stays.
                if key not in ("emptyDir", "podSelector", "apiGroups"):
                    yield from empty(item, f"{path}.{key}")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from empty(item, f"{path}[{index}]")
        if value is None or value in ("", [], {}):
            yield path

    for manifest in build(case):
        assert list(empty(manifest, manifest["kind"])) == []
        assert not differs(manifest, manifest)


def test_children_carry_owner_labels_and_digest(case: dict[str, Any], build: Build) -> None:
    owner = case["owner"]
    for manifest in build(case):
        metadata = manifest["metadata"]
        assert kind_of(manifest) in CHILD_KINDS
        assert metadata["namespace"] == owner["metadata"]["namespace"]
        assert naming.owner_labels(owner).items() <= metadata["labels"].items()
        assert manifest == naming.stamp(manifest)
        if "-erase-" in metadata["name"]:
            assert "ownerReferences" not in metadata
        else:
            (reference,) = metadata["ownerReferences"]
            assert reference["uid"] == owner["metadata"]["uid"]


def _check_names(manifests: list[dict[str, Any]]) -> None:
    keys = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(keys)) == len(keys)
    for manifest in manifests:
        assert LABEL.fullmatch(manifest["metadata"]["name"]), manifest["metadata"]["name"]
        template = manifest.get("spec", {}).get("template", {})
        for labels in (manifest["metadata"]["labels"], template.get("metadata", {}).get("labels")):
            assert all(LABEL_VALUE.fullmatch(value) for value in (labels or {}).values())


@settings(deadline=None)
@given(
    name=names,
    input_digest=st.from_regex(r"[0-9a-f]{10,32}", fullmatch=True),
    attempt=st.integers(0, 999),
    parallelism=st.integers(1, 64),
)
def test_names_of_a_stores_children(
    build: Build, name: str, input_digest: str, attempt: int, parallelism: int
) -> None:
    manifests = build(
        {
            "owner": {
                "kind": "MemoryStore",
                "metadata": {"name": name, "namespace": "team", "uid": "u"},
                "spec": {
                    "model": {"id": "m", "cache": {"size": "1Gi"}},
                    "source": {"configMap": {"name": "facts"}},
                    "job": {"parallelism": parallelism},
                },
            },
            "defaults": {"runtime_image": "image"},
            "input": input_digest,
            "attempt": attempt,
        }
    )
    _check_names(manifests)
    (job,) = filter(_indexed, manifests)
    last = job["spec"]["completions"] - 1
    # Kubernetes refuses an Indexed Job whose last pod's host name is too long.
    assert LABEL.fullmatch(f"{job['metadata']['name']}-{last}")


def _indexed(manifest: dict[str, Any]) -> bool:
    return bool(manifest.get("spec", {}).get("completionMode") == "Indexed")


@settings(deadline=None)
@given(name=names, stores=st.lists(names, min_size=1, max_size=16, unique=True))
def test_names_of_a_models_children(build: Build, name: str, stores: list[str]) -> None:
    store = {"model": {"id": "m"}, "source": {"configMap": {"name": "facts"}}}
    manifests = build(
        {
            "owner": {
                "kind": "PersonalizedModel",
                "metadata": {"name": name, "namespace": "team", "uid": "u"},
                "spec": {
                    "model": {"id": "m", "cache": {"size": "1Gi"}},
                    "memoryStores": [{"name": item} for item in stores],
                    "serving": {"replicas": 2},
                    "auth": {"mode": "apiKey"},
                },
            },
            "stores": [{"name": item, "spec": store, "fingerprint": "0" * 64} for item in stores],
            "defaults": {"runtime_image": "image"},
            "optionalKinds": ["PodMonitor"],
            "apiKeySecret": "key",
            "apiKey": "key",
        }
    )
    _check_names(manifests)
    for template in _pods(manifests):
        assert all(LABEL.fullmatch(volume["name"]) for volume in template["spec"]["volumes"])
