from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_operator.api.base import Resources
from inferscale_operator.desired.quantities import (
    canonical_quantity,
    encoder_resources,
    format_bytes,
    server_resources,
    shm_bytes,
)
from inferscale_runtime.budget import ConfigError, exact_quantity, parse_quantity

GIB = 1 << 30
MIB = 1 << 20


# As k8s.io/apimachinery's own table of canonical forms (quantity_test.go) has them.
@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("0", "0"),
        ("0Gi", "0"),
        ("1", "1"),
        ("100", "100"),
        ("1000", "1k"),
        ("1024", "1024"),
        ("1200", "1200"),
        ("10000", "10k"),
        ("1024Mi", "1Gi"),
        ("1.5Gi", "1536Mi"),
        ("0.5Ti", "512Gi"),
        ("0.5Ki", "512"),
        ("0.5", "500m"),
        ("1000m", "1"),
        ("2500m", "2500m"),
        ("0.1", "100m"),
        ("1500M", "1500M"),
        ("1.5G", "1500M"),
        ("1000k", "1M"),
        ("1e3", "1e3"),
        ("1E3", "1e3"),
        ("12e1", "120"),
        ("1e10", "10e9"),
        ("1E", "1E"),
        ("0.0000000001", "1n"),
        ("0.3Ki", "307200m"),
        ("99999999999999999999", "9223372036854775807"),
    ],
)
def test_canonical_form(text: str, canonical: str) -> None:
    assert canonical_quantity(text) == canonical


quantities = st.from_regex(r"[0-9]{1,6}(\.[0-9]{1,3})?([eE][0-9]|[mkMG]|[KMG]i)?", fullmatch=True)


@settings(deadline=None)
@given(quantities)
def test_canonical_form_keeps_the_value_and_is_final(text: str) -> None:
    once = canonical_quantity(text)
    assert exact_quantity(once) == exact_quantity(text)
    assert canonical_quantity(once) == once


def test_no_quantity_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'8 GB'"):
        canonical_quantity("8 GB")


@pytest.mark.parametrize(
    ("dram", "size"),
    [
        ("16Gi", 19661 * MIB),  # 20 % on top, rounded up
        ("10Gi", 12 * GIB),
        ("1Gi", 1280 * MIB),  # at least 256 MiB on top
        ("1Mi", 257 * MIB),
    ],
)
def test_shared_memory_is_the_tier_with_a_margin(dram: str, size: int) -> None:
    assert shm_bytes(dram) == size


@settings(deadline=None)
@given(st.integers(1, 1 << 45))
def test_shared_memory_is_whole_mebibytes_and_never_short(tier: int) -> None:
    size = shm_bytes(str(tier))
    assert size % MIB == 0
    assert size * 5 >= tier * 6


def _resources(**values: dict[str, str]) -> Resources:
    return Resources.model_validate(values)


@pytest.mark.parametrize(
    ("given_", "ranks", "requests", "limits"),
    [
        ({}, 1, {"memory": "5376Mi"}, None),
        ({}, 2, {"memory": "7424Mi"}, {"nvidia.com/gpu": "2"}),
        ({"requests": {"memory": "8Gi"}}, 1, {"memory": "9472Mi"}, None),
        ({"limits": {"memory": "8Gi"}}, 1, {"memory": "9472Mi"}, {"memory": "9472Mi"}),
        (
            {"requests": {"memory": "4Gi", "cpu": "0.5"}, "limits": {"memory": "8Gi"}},
            1,
            {"cpu": "500m", "memory": "5376Mi"},
            {"memory": "9472Mi"},
        ),
        ({"limits": {"nvidia.com/gpu": "1"}}, 2, {"memory": "7424Mi"}, {"nvidia.com/gpu": "1"}),
        (
            {"limits": {"nvidia.com/mig-3g.40gb": "2"}},
            2,
            {"memory": "7424Mi"},
            {"nvidia.com/mig-3g.40gb": "2"},
        ),
        (
            {"requests": {"amd.com/gpu": "2"}},
            2,
            {"amd.com/gpu": "2", "memory": "7424Mi"},
            {"amd.com/gpu": "2"},
        ),
        (
            {"limits": {"rdma/hca": "1"}},
            2,
            {"memory": "7424Mi"},
            {"nvidia.com/gpu": "2", "rdma/hca": "1"},
        ),
    ],
)
def test_resources_of_a_server(
    given_: dict[str, dict[str, str]], ranks: int, requests: Any, limits: Any
) -> None:
    made = server_resources(_resources(**given_), ranks, "1Gi")
    assert made["requests"] == requests
    assert made.get("limits") == limits


@settings(deadline=None)
@given(st.integers(1, 1 << 42), st.integers(1, 1 << 42))
def test_a_server_gets_what_was_asked_and_its_shared_memory(asked: int, tier: int) -> None:
    both = {"memory": str(asked)}
    made = server_resources(_resources(requests=both, limits=both), 1, str(tier))
    assert parse_quantity(made["requests"]["memory"]) == asked + shm_bytes(str(tier))
    assert made["limits"]["memory"] == made["requests"]["memory"]


@pytest.mark.parametrize(
    ("given_", "memory"),
    [
        ({}, "6Gi"),  # 4 GiB for processes, and the KV cache is in host memory
        ({"limits": {"nvidia.com/gpu": "1"}}, "4Gi"),
        ({"requests": {"memory": "3Gi"}}, "3Gi"),
        ({"limits": {"memory": "3Gi"}}, "3Gi"),
    ],
)
def test_memory_of_an_encoder(given_: dict[str, dict[str, str]], memory: str) -> None:
    assert encoder_resources(_resources(**given_), "2Gi")["requests"]["memory"] == memory


@settings(deadline=None)
@given(st.integers(0, (1 << 63) - 1))
def test_bytes_are_written_exactly(value: int) -> None:
    assert parse_quantity(format_bytes(value)) == value
