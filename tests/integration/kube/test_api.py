"""The two kinds on a real API server."""

from __future__ import annotations

from tests.integration.kube.control_plane import Kubectl


def test_both_kinds_are_served(kubectl: Kubectl) -> None:
    assert kubectl("api-resources", "--api-group=inferscale.dev", "-o", "name").split() == [
        "memorystores.inferscale.dev",
        "personalizedmodels.inferscale.dev",
    ]
