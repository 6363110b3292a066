from __future__ import annotations

import math

import pytest

from inferscale_operator.planner.load import PodLoad, growth, names_of, quantile, total_load

BUCKETS = ((0.1, 0.0), (0.5, 50.0), (1.0, 90.0), (2.0, 100.0), (math.inf, 100.0))


@pytest.mark.parametrize(
    ("part", "value"), [(0.5, 0.5), (0.95, 1.5), (1.0, 2.0), (0.25, 0.3), (0.9, 1.0)]
)
def test_quantiles_are_those_of_prometheus(part: float, value: float) -> None:
    assert quantile(part, BUCKETS) == pytest.approx(value)


def test_quantiles_at_the_ends() -> None:
    assert quantile(0.95, ()) is None
    assert quantile(0.95, ((1.0, 0.0), (math.inf, 0.0))) is None
    assert quantile(0.95, ((1.0, 0.0), (math.inf, 5.0))) == 1.0


@pytest.mark.parametrize(
    ("history", "slope"),
    [
        ([], 0.0),
        ([(10, 0), (0, 9)], 0.0),
        ([(4, 0), (2, 9), (0, 18)], 0.0),
        ([(20, 0), (10, 5), (0, 10)], 0.5),
        ([(20, 10), (10, 5), (0, 0)], 0.0),
        ([(20, 4), (10, 4), (0, 4)], 0.0),
    ],
)
def test_growth_needs_three_looks_over_ten_seconds(
    history: list[tuple[float, float]], slope: float
) -> None:
    assert growth(history) == pytest.approx(slope)


def test_a_pod_that_never_told_makes_all_figures_old() -> None:
    told = {"a": PodLoad(3.0, running=2, waiting=1, answered=4)}
    assert total_load(["a"], told, 2) == total_load(["a"], {**told, "gone": PodLoad(99.0)}, 2)
    total = total_load(["a"], told, 2)
    assert (total.requests, total.held, total.age_seconds, total.answered) == (3, 2, 3.0, 4)
    assert total.fresh
    assert not total_load(["a", "b"], told, 0).fresh
    assert total_load([], {}, 1).fresh


def test_whether_anybody_asked_is_not_known_after_one_look() -> None:
    loads = {"a": PodLoad(0.0, answered=0.0), "b": PodLoad(0.0, answered=None)}
    assert total_load(["a"], loads, 0).answered == 0
    assert total_load(["a", "b"], loads, 0).answered is None


def test_a_name_counts_when_every_pod_has_it() -> None:
    loads = {
        "a": PodLoad(0.0, names={"running": "x", "kvCache": "new"}),
        "b": PodLoad(0.0, names={"running": "x"}),
    }
    assert names_of(["a", "b"], loads) == {"running": "x"}
    assert names_of(["c"], loads) is None
