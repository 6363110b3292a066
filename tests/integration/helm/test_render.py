"""What the chart renders for five values files: goldens, validity, restricted pods, rights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.integration.helm.conftest import VALUES
from tests.integration.helm.helm_binary import CHART, Helm

Render = Callable[[Path], list[dict[str, Any]]]

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36")
WITHOUT_SCHEMA = {"CustomResourceDefinition", "ServiceMonitor", "PodMonitor", "PrometheusRule"}
GOLDEN = Path(__file__).parent / "golden"
CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}


def test_five_values_files() -> None:
    assert len(VALUES) == 5


def test_lint_is_strict(helm: Helm, values_file: Path) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), "--values", str(values_file))


def test_golden(rendered: Render, values_file: Path) -> None:
    manifests = [_short(item) for item in rendered(values_file)]
    text = yaml.safe_dump_all(manifests, sort_keys=False, width=100)
    golden = GOLDEN / values_file.name
    if os.environ.get("INFERSCALE_UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert manifests == list(yaml.safe_load_all(golden.read_text(encoding="utf-8"))), (
        f"{golden.name} differs; look at the change and run with INFERSCALE_UPDATE_GOLDEN=1"
    )


def _short(manifest: dict[str, Any]) -> dict[str, Any]:
    """Without contents that have files of their own in the chart."""
    if manifest["kind"] == "CustomResourceDefinition":
        return {**manifest, "spec": "files/crds"}
    if manifest["kind"] == "ConfigMap" and "inferscale.json" in manifest["data"]:
        return {**manifest, "data": {"inferscale.json": "files/dashboards"}}
    if manifest["kind"] == "Pod":
        (container,) = manifest["spec"]["containers"]
        container = {**container, "command": [*container["command"][:2], "files/ask.py"]}
        return {**manifest, "spec": {**manifest["spec"], "containers": [container]}}
    return manifest


@pytest.mark.parametrize("version", VERSIONS)
def test_built_in_objects_fit_the_schema_of(
    version: str, rendered: Render, values_file: Path
) -> None:
    checked = [item for item in rendered(values_file) if item["kind"] not in WITHOUT_SCHEMA]
    assert checked
    for manifest in checked:
        assert kubernetes_validate.validate(manifest, version, strict=True) == version


def test_contents_of_files_are_whole(rendered: Render) -> None:
    """A file that .helmignore leaves out would render as nothing."""
    manifests = {values: rendered(values) for values in VALUES}
    seen = set()
    for manifest in (item for group in manifests.values() for item in group):
        if manifest["kind"] == "Pod":
            text = manifest["spec"]["containers"][0]["command"][2]
            assert text.strip() == (CHART / "files" / "ask.py").read_text().strip()
        elif manifest["kind"] == "CustomResourceDefinition":
            plural = manifest["metadata"]["name"].split(".")[0]
            metadata = dict(manifest["metadata"])
            assert metadata.pop("annotations")["helm.sh/resource-policy"] == "keep"
            file = CHART / "files" / "crds" / f"inferscale.dev_{plural}.yaml"
            assert {**manifest, "metadata": metadata} == yaml.safe_load(file.read_text())
        elif manifest["kind"] == "ConfigMap":
            text = manifest["data"]["inferscale.json"]
            assert text == (CHART / "files" / "dashboards" / "inferscale.json").read_text().strip()
        elif manifest["kind"] == "PrometheusRule":
            alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
            groups = manifest["spec"]["groups"]
            assert [len(group["rules"]) for group in groups] == [len(g["rules"]) for g in alerts]
            for rule in (rule for group in groups for rule in group["rules"]):
                page = f"https://runbooks.example.test/inferscale/{rule['alert']}.md"
                assert rule["annotations"]["runbook_url"] == page
                assert rule["labels"]["team"] == "memory"
        else:
            continue
        seen.add(manifest["kind"])
    assert seen == {"Pod", "CustomResourceDefinition", "ConfigMap", "PrometheusRule"}


def _pods(manifests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            yield manifest["spec"]
        elif "template" in manifest.get("spec", {}):
            yield manifest["spec"]["template"]["spec"]


def test_pods_are_restricted(rendered: Render, values_file: Path) -> None:
    pods = list(_pods(rendered(values_file)))
    assert len(pods) >= 2
    for spec in pods:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        assert isinstance(spec["automountServiceAccountToken"], bool)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert all(volume.keys() - {"name"} == {"emptyDir"} for volume in spec.get("volumes", []))
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


def test_labels_and_namespaces_are_complete(rendered: Render, values_file: Path) -> None:
    keys = set()
    for manifest in rendered(values_file):
        metadata = manifest["metadata"]
        keys.add((manifest["kind"], metadata.get("namespace"), metadata["name"]))
        assert (manifest["kind"] in CLUSTER_WIDE) == ("namespace" not in metadata)
        if manifest["kind"] == "CustomResourceDefinition":
            continue
        for label in ("name", "instance", "component", "version", "managed-by", "part-of"):
            assert f"app.kubernetes.io/{label}" in metadata["labels"]
        assert metadata["labels"]["helm.sh/chart"].startswith("inferscale-")
    assert len(keys) == len(rendered(values_file))


def test_nothing_is_granted_by_wildcard_and_secrets_are_not_listed(
    rendered: Render, values_file: Path
) -> None:
    for manifest in rendered(values_file):
        for rule in manifest.get("rules", []):
            assert not {"*"} & {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            if "secrets" in rule["resources"]:
                assert rule["resources"] == ["secrets"]
                assert not {"list", "watch"} & set(rule["verbs"])


def test_namespaced_mode_has_no_cluster_wide_object(rendered: Render) -> None:
    (values,) = (path for path in VALUES if path.stem == "namespaced")
    manifests = rendered(values)
    assert not CLUSTER_WIDE & {item["kind"] for item in manifests}
    roles = {
        (i["metadata"]["namespace"], len(i["rules"])) for i in manifests if i["kind"] == "Role"
    }
    assert {namespace for namespace, _ in roles} == {"team-a", "team-b", "inferscale"}


def test_air_gapped_images_come_from_the_mirror_by_digest(rendered: Render) -> None:
    (values,) = (path for path in VALUES if path.stem == "airgapped")
    text = yaml.safe_dump_all(rendered(values))
    for spec in _pods(rendered(values)):
        assert spec["imagePullSecrets"] == [{"name": "mirror"}, {"name": "second"}]
        (container,) = spec["containers"]
        operator = "registry.example.test:5000/mirror/inferscale/operator@sha256:" + "1" * 64
        assert container["image"] == operator
    assert "--runtime-image=registry.example.test:5000/mirror/inferscale/runtime@sha256:2" in text


def test_selectors_choose_the_operators_pods_alone(rendered: Render, values_file: Path) -> None:
    manifests = rendered(values_file)
    (deployment,) = (item for item in manifests if item["kind"] == "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert selector.items() <= labels.items()
    others = [item["metadata"]["labels"] for item in manifests if item["kind"] in ("Job", "Pod")]
    assert not any(selector.items() <= other.items() for other in others)
    for manifest in manifests:
        if manifest["kind"] == "Service":
            assert manifest["spec"]["selector"] == selector


def test_operator_takes_its_arguments(rendered: Render, values_file: Path) -> None:
    """The real command line parser reads what the chart writes."""
    from inferscale_operator.settings import read_settings

    (deployment,) = (item for item in rendered(values_file) if item["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    words = [word.replace("$(POD_NAMESPACE)", "inferscale") for word in container["args"]]
    settings = read_settings(words, {}, Path("/nonexistent"))
    assert settings.lease_place == "inferscale"
    roles = [item for item in rendered(values_file) if item["kind"] == "Role"]
    names = {
        name for role in roles for rule in role["rules"] for name in rule.get("resourceNames", [])
    }
    assert names in (set(), {settings.lease_name})


def test_defaults_and_versions_are_those_of_the_program(rendered: Render) -> None:
    from inferscale_operator.settings import VERSION, Settings, read_settings

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == VERSION
    (values,) = (path for path in VALUES if path.stem == "default")
    (deployment,) = (item for item in rendered(values) if item["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    words = [word for word in container["args"] if "operator-namespace" not in word]
    own = Settings(identity="same")
    given = read_settings([*words, "--identity=same"], {}, Path("/nonexistent"))
    assert given == own


def test_notes_name_the_first_commands(helm: Helm) -> None:
    where = ("--dry-run=client", "--namespace", "here")
    out = helm("install", "inferscale", str(CHART), *where)
    notes = out.split("NOTES:")[1]
    for command in ("kubectl -n here rollout status", "kubectl get inferscale", "helm test"):
        assert command in notes


def test_readme_is_up_to_date() -> None:
    script = CHART / "generate_readme.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
