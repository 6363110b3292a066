"""Fixtures of the tests on a real API server."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.integration.kube.control_plane import (
    ControlPlane,
    Kubectl,
    MissingControlPlane,
    give_up,
    start,
)


def _started(folder: Path, *, controllers: bool) -> Iterator[ControlPlane]:
    try:
        with start(folder, controllers=controllers) as plane:
            yield plane
    except MissingControlPlane as error:
        give_up(error)


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server with the CRDs and without controllers: nothing changes by itself."""
    yield from _started(tmp_path_factory.mktemp("kube") / "plain", controllers=False)


@pytest.fixture(scope="session")
def controlled_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server whose Deployments, garbage collection and namespace deletion work."""
    yield from _started(tmp_path_factory.mktemp("kube") / "controllers", controllers=True)


def _fresh_namespace(plane: ControlPlane) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:10]}"
    plane.kubectl("create", "namespace", name)
    yield name
    plane.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A fresh namespace of ``control_plane``."""
    yield from _fresh_namespace(control_plane)


@pytest.fixture
def controlled_namespace(controlled_plane: ControlPlane) -> Iterator[str]:
    """A fresh namespace of ``controlled_plane``."""
    yield from _fresh_namespace(controlled_plane)


@pytest.fixture
def kubectl(control_plane: ControlPlane, namespace: str) -> Kubectl:
    """Runs kubectl in the test's namespace; returns its output or raises ``KubectlError``."""

    def run(*arguments: str, stdin: str | None = None) -> str:
        return control_plane.kubectl(*arguments, stdin=stdin, namespace=namespace)

    return run


@pytest.fixture
def controlled_kubectl(controlled_plane: ControlPlane, controlled_namespace: str) -> Kubectl:
    """The same for ``controlled_plane``."""

    def run(*arguments: str, stdin: str | None = None) -> str:
        return controlled_plane.kubectl(*arguments, stdin=stdin, namespace=controlled_namespace)

    return run
