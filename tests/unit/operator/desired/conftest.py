"""Builds every child of a resource, as the planner would over its life."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.encoder import (
    build_encode_run,
    build_encoder_base,
    build_erase_job,
)
from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.desired.router import build_router
from inferscale_operator.desired.server import (
    build_activator,
    build_api_key_secret,
    build_disruption_budget,
    build_generation,
    build_server_base,
    build_servers_service,
    build_service,
    server_generation,
)
from inferscale_operator.desired.stores import StoreView

CASES = Path(__file__).parent / "cases"

Build = Callable[[dict[str, Any]], list[Manifest]]


def _memory_store(case: dict[str, Any], defaults: Defaults) -> list[Manifest]:
    owner = case["owner"]
    spec = MemoryStoreSpec.model_validate(owner["spec"])
    return [
        *build_encoder_base(owner, spec, defaults),
        *build_encode_run(owner, spec, defaults, case["input"], case["attempt"]),
        build_erase_job(owner, spec, defaults),
    ]


def _personalized_model(case: dict[str, Any], defaults: Defaults) -> list[Manifest]:
    owner = case["owner"]
    spec = PersonalizedModelSpec.model_validate(owner["spec"])
    stores = [
        StoreView(item["name"], MemoryStoreSpec.model_validate(item["spec"]), item["fingerprint"])
        for item in case["stores"]
    ]
    generation = server_generation(spec, stores)
    secret = case.get("apiKeySecret")
    budget = build_disruption_budget(owner, spec, generation)
    return [
        *build_server_base(
            owner, spec, defaults, case.get("optionalKinds", []), case.get("metricNames")
        ),
        *_activator(owner, spec, defaults, secret, generation),
        *([build_api_key_secret(owner, case["apiKey"])] if secret else []),
        *build_generation(owner, spec, stores, defaults, generation, secret),
        *build_router(owner, spec, defaults, generation),
        build_service(owner, generation, routed=spec.routing.provider != "none"),
        *([budget] if budget else []),
    ]


def _activator(
    owner: Manifest,
    spec: PersonalizedModelSpec,
    defaults: Defaults,
    secret: str | None,
    generation: str,
) -> list[Manifest]:
    zero = spec.autoscaling.scale_to_zero
    if zero is None:
        return []
    return [
        *build_activator(owner, spec, zero, defaults, secret),
        build_servers_service(owner, generation),
    ]


def build_children(case: dict[str, Any]) -> list[Manifest]:
    """All manifests that a case leads to."""
    given = dict(case["defaults"])
    labels = tuple(given.pop("monitor_labels", {}).items())
    defaults = Defaults(**given, monitor_labels=labels)
    if case["owner"]["kind"] == "MemoryStore":
        return _memory_store(case, defaults)
    return _personalized_model(case, defaults)


@pytest.fixture(scope="session")
def build() -> Build:
    """The builder of all children."""
    return build_children


@pytest.fixture(params=sorted(path.stem for path in CASES.glob("*.yaml")))
def case_name(request: pytest.FixtureRequest) -> str:
    """Name of each case in turn."""
    return str(request.param)


@pytest.fixture
def case(case_name: str) -> dict[str, Any]:
    """Each case in turn."""
    loaded: dict[str, Any] = yaml.safe_load((CASES / f"{case_name}.yaml").read_text())
    return loaded
