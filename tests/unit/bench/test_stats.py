"""Percentiles and ratios."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale_runtime.bench.stats import percentile, ratio, summary


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    percent=st.floats(0, 100),
)
def test_percentile_is_the_smallest_value_that_covers_its_share(
    values: list[float], percent: float
) -> None:
    found = percentile(values, percent)
    assert found in values
    covered = sum(value <= found for value in values)
    assert covered >= len(values) * percent / 100
    smaller = [value for value in values if value < found]
    assert not smaller or len(smaller) < len(values) * percent / 100


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_of_nothing_or_of_no_share(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_summary_is_in_milliseconds() -> None:
    assert summary([0.001, 0.002, 0.003, 0.1], "ttft") == {
        "ttft_p50_ms": 2.5,
        "ttft_p95_ms": 100.0,
        "ttft_p99_ms": 100.0,
    }


def test_ratio() -> None:
    assert ratio(1.0, 3.0) == 0.333
    assert ratio(1.0, 0.0) is None
