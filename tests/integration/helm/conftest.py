"""Fixtures of the chart's tests: Helm, an API server, and whoever runs Jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.integration.helm.helm_binary import Helm, find_helm
from tests.integration.kube.conftest import control_plane, namespace

__all__ = ["control_plane", "namespace"]

VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
WITH_PROMETHEUS = ("--api-versions", "monitoring.coreos.com/v1")


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Runs helm."""
    return Helm(find_helm(), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def rendered(helm: Helm) -> Callable[[Path], list[dict[str, Any]]]:
    """The objects for a values file; each is rendered once."""
    known: dict[Path, list[dict[str, Any]]] = {}

    def render(values: Path) -> list[dict[str, Any]]:
        if values not in known:
            known[values] = helm.template("--values", str(values), *WITH_PROMETHEUS)
        return known[values]

    return render


@pytest.fixture(params=VALUES, ids=lambda path: path.stem)
def values_file(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Each of the values files in turn."""
    return request.param
