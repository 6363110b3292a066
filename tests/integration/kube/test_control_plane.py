"""Where the API server of the tests comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.kube import control_plane as source
from tests.integration.kube.control_plane import ControlPlane, Kubectl, MissingControlPlane


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine without the script and without variables that name a cluster."""
    monkeypatch.setattr(source, "SCRIPT", tmp_path / "missing")
    for name in ("KUBECONFIG", "KUBEBUILDER_ASSETS", "CI"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_it_says_what_is_missing(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (
        pytest.raises(MissingControlPlane, match=r"neither KUBECONFIG .* nor KUBEBUILDER_ASSETS"),
        source.start(tmp_path, controllers=False),
    ):
        pass


def test_without_an_api_server_tests_are_skipped(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.skip.Exception, match="did not run: none"):
        source.give_up(MissingControlPlane("none"))


def test_in_ci_they_fail(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("CI", "true")

    with pytest.raises(pytest.fail.Exception, match="did not run: none"):
        source.give_up(MissingControlPlane("none"))


def test_a_cluster_of_the_environment_is_taken(
    control_plane: ControlPlane, bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare.setenv("KUBECONFIG", str(control_plane.kubeconfig))

    with source.start(tmp_path, controllers=True) as plane:
        assert plane.server() == control_plane.server()
    assert control_plane.kubectl("get", "--raw", "/readyz") == "ok"


def test_a_namespace_goes_where_controllers_run(
    controlled_plane: ControlPlane, controlled_kubectl: Kubectl, controlled_namespace: str
) -> None:
    controlled_kubectl("create", "configmap", "left")
    controlled_plane.kubectl("delete", "namespace", controlled_namespace, "--timeout=60s")

    names = controlled_plane.kubectl("get", "namespaces", "-o", "name").split()
    assert f"namespace/{controlled_namespace}" not in names


def test_an_error_has_what_kubectl_said(kubectl: Kubectl) -> None:
    with pytest.raises(source.KubectlError, match=r'configmaps "nothing" not found'):
        kubectl("get", "configmap", "nothing")
