"""Wrong values are refused with their path; the schema and the comments know every value."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import util
from typing import Any

import pytest
import yaml
from tests.integration.helm.helm_binary import CHART, Helm, HelmError

# What is set, and what the refusal has to name.
WRONG = {
    "replica=2": "replica",
    "replicas=0": "/replicas",
    "replicas=4": "/replicas",
    "replicas=two": "/replicas",
    "image.digest=sha256:12": "/image/digest",
    "image.pullPolicy=Sometimes": "/image/pullPolicy",
    "image.repository=UPPER": "/image/repository",
    "runtimeImage.pullPolicy=Always": "/runtimeImage",
    "watch.namespaces={Team}": "/watch/namespaces/0",
    "watch.namespaces=team": "/watch/namespaces",
    "rbac.create=maybe": "/rbac/create",
    "rbac.cluster=false": "/rbac",
    "crds.method=crds": "/crds/method",
    "crds.timeoutSeconds=1": "/crds/timeoutSeconds",
    "operator.logLevel=trace": "/operator/logLevel",
    "operator.workers=0": "/operator/workers",
    "operator.leaseSeconds=1": "/operator/leaseSeconds",
    "operator.runAsUser=0": "/operator/runAsUser",
    "operator.resources.limit.cpu=1": "/operator/resources",
    "operator.podLabels.a=1": "/operator/podLabels/a",
    "networkPolicy.apiServer.ports={}": "/networkPolicy/apiServer/ports",
    "networkPolicy.apiServer.ports={99999}": "/networkPolicy/apiServer/ports/0",
    "networkPolicy.apiServer.cidrs={10.0.0.1}": "/networkPolicy/apiServer/cidrs/0",
    "networkPolicy.metricsNamespaces={a,a}": "/networkPolicy/metricsNamespaces",
    "monitoring.serviceMonitor.interval=often": "/monitoring/serviceMonitor/interval",
    "monitoring.prometheusRule.runbookBaseUrl=": "/monitoring/prometheusRule/runbookBaseUrl",
    "monitoring.dashboards.enabled=true": "/monitoring",
    "test.model=Chat": "/test/model",
    "test.question=": "/test/question",
    "serviceAccount.name=a_b": "/serviceAccount/name",
}

# Values that do not go together, and words of the refusal.
UNFIT = {
    "serviceAccount.create=false": ("serviceAccount.name is empty",),
    "podDisruptionBudget.enabled=true": ("podDisruptionBudget.enabled", "replicas is 1"),
    "test.apiKeySecret.name=key": ("test.apiKeySecret.name is 'key'", "test.model is empty"),
    "watch.namespaces={a,a}": ("watch.namespaces", "twice"),
    "rbac.create=false": ("rbac.create is false", "crds.method is 'hook'"),
    "monitoring.serviceMonitor.enabled=true": ("serviceMonitor", "Prometheus operator"),
    "monitoring.encoderPodMonitor.enabled=true": ("encoderPodMonitor", "Prometheus operator"),
    "monitoring.prometheusRule.enabled=true": ("prometheusRule", "Prometheus operator"),
}


def refusal(helm: Helm, setting: str) -> str:
    with pytest.raises(HelmError) as error:
        helm.template("--set", setting)
    return str(error.value)


@pytest.mark.parametrize("setting", WRONG)
def test_schema_refuses_with_the_path(helm: Helm, setting: str) -> None:
    message = refusal(helm, setting)
    assert "values don't meet the specifications of the schema" in message
    assert WRONG[setting] in message


@pytest.mark.parametrize("setting", UNFIT)
def test_values_that_do_not_go_together_are_refused(helm: Helm, setting: str) -> None:
    message = refusal(helm, setting)
    assert "schema" not in message
    for words in UNFIT[setting]:
        assert words in message


def test_older_clusters_are_refused(helm: Helm) -> None:
    with pytest.raises(HelmError, match=r"requires kubeVersion: >=1.31.0-0"):
        helm.template("--kube-version", "1.30.9")
    assert helm.template("--kube-version", "1.31.0-gke.5")


def test_same_values_are_taken_together(helm: Helm) -> None:
    """The counterpart of the table above: what the messages ask for is accepted."""
    mended = (
        "serviceAccount.create=false,serviceAccount.name=own,rbac.create=false",
        "podDisruptionBudget.enabled=true,replicas=2",
        "test.apiKeySecret.name=key,test.model=chat",
        "rbac.create=false,crds.method=none",
    )
    for values in mended:
        assert helm.template("--set", values)


def _leaves(values: Any, path: str = "") -> Iterator[str]:
    if isinstance(values, dict) and values and not path.endswith((".resources", ".labels")):
        for key, value in values.items():
            yield from _leaves(value, f"{path}.{key}")
    else:
        yield path


def _schema_leaves(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    properties = schema.get("properties")
    if properties and not path.endswith(".resources"):
        if path != ".global":
            assert schema.get("additionalProperties") is False, path
        for key, value in properties.items():
            yield from _schema_leaves(value, f"{path}.{key}")
    else:
        yield path


def test_schema_knows_exactly_the_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(_schema_leaves(schema)) == set(_leaves(values))


def test_every_value_is_described() -> None:
    spec = util.spec_from_file_location("generate_readme", CHART / "generate_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    text = (CHART / "values.yaml").read_text()
    found = {value.path: value for value in module.read_values(text)}
    for path in _leaves(yaml.safe_load(text)):
        assert found[path.lstrip(".")].text, f"{path} has no comment"
