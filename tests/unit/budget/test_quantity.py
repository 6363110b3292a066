"""Kubernetes quantities: the documented grammar, rounding and bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_runtime.budget import format_quantity, parse_quantity
from inferscale_runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("500", 500),
        ("+5", 5),
        ("-5", -5),
        ("8Gi", 8 << 30),
        ("1.5Gi", 3 << 29),
        (".5Gi", 1 << 29),
        ("1.Mi", 1 << 20),
        ("1Ki", 1024),
        ("1k", 1000),
        ("2M", 2_000_000),
        ("1E", 10**18),
        ("1Ei", 1 << 60),
        ("1E3", 1000),
        ("1e3", 1000),
        ("12e-1", 2),
        ("1500m", 2),
        ("-1500m", -2),
        ("1n", 1),
        ("3u", 1),
        ("100Ei", (1 << 63) - 1),
        ("1e9999", (1 << 63) - 1),
    ],
)
def test_reads(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "Gi", "8GiB", "8gi", "8 Gi", " 8Gi", "8Gi\n", "1K", "1e", "1e+", "--1", "1.2.3"),
        *("0x10", "1_000", "٣Gi", "inf", "1mi", "1e99999"),
    ],
)
def test_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="not a Kubernetes quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (8 << 30, "8Gi"), (1536 << 20, "1536Mi"), (1000, "1000"), (1 << 60, "1Ei")],
)
def test_writes_the_shortest_exact_form(value: int, text: str) -> None:
    assert format_quantity(value) == text


@settings(deadline=None)
@given(st.integers(-(1 << 62), 1 << 62))
def test_writing_loses_nothing(value: int) -> None:
    assert parse_quantity(format_quantity(value)) == value
