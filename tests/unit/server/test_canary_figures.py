"""What the canary measures and concludes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale_runtime.config import CanaryConfig
from inferscale_runtime.server.canary_figures import (
    Sample,
    StoreWatch,
    compare_positions,
    truncated_kl,
)

GOOD, BAD = Sample(0.2, 8, 8), Sample(40.0, 1, 8)


def best(probabilities: list[float], count: int) -> dict[int, float]:
    """Log-probabilities of the most likely tokens."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[:count]
    return {token: math.log(probabilities[token]) for token in order}


def normalised(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


distributions = st.lists(st.floats(0.01, 100), min_size=12, max_size=12).map(normalised)


@given(distributions, distributions, st.integers(1, 12))
def test_never_more_than_the_true_divergence(p: list[float], q: list[float], count: int) -> None:
    true = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    found = truncated_kl(best(p, count), best(q, count))
    assert -1e-12 <= found <= true + 1e-6
    if count == 12:
        assert found == pytest.approx(true, abs=1e-6)


def test_lists_without_a_common_token() -> None:
    """All that is known is that something differs; agreement says the rest."""
    sample = compare_positions([{1: -0.01}], [{2: -0.01}])
    assert sample.kl == pytest.approx(0, abs=1e-9)
    assert (sample.matches, sample.positions) == (0, 1)


def test_positions_add_up() -> None:
    one, other = {1: math.log(0.5), 2: math.log(0.5)}, {1: math.log(0.25), 2: math.log(0.75)}
    sample = compare_positions([one, one], [one, other])
    assert sample.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert (sample.matches, sample.positions) == (1, 2)  # a tie goes to the lower id


def watch(**fields: float) -> StoreWatch:
    return StoreWatch(CanaryConfig.model_validate({"start_samples": 2, "window": 4, **fields}))


def test_no_verdict_before_there_are_samples_enough() -> None:
    store = watch()
    assert not store.add(BAD, 0)
    assert store.state == "unknown"
    assert store.add(BAD, 0)
    assert store.state == "degraded"


@pytest.mark.parametrize(
    ("sample", "limits", "state"),
    [
        (Sample(0.75, 8, 8), {"kl_limit": 0.1}, "ok"),
        (Sample(0.9, 8, 8), {"kl_limit": 0.1}, "degraded"),
        (Sample(0.0, 6, 8), {"top1_limit": 0.75}, "ok"),
        (Sample(0.0, 5, 8), {"top1_limit": 0.75}, "degraded"),
    ],
)
def test_limits(sample: Sample, limits: dict[str, float], state: str) -> None:
    store = watch(**limits)
    store.add(sample, 0)
    assert store.add(sample, 0)
    assert store.state == state
    assert not store.add(sample, 0), "no change, no news"


def test_figures_are_means_over_the_positions_of_the_window() -> None:
    store = watch()
    assert store.figures is None
    for sample in (BAD, Sample(1.0, 3, 4), GOOD, GOOD, Sample(0.0, 0, 2)):
        store.add(sample, 0)
    figures = store.figures
    assert figures is not None
    assert figures.samples == 4, "the oldest has left the window"
    assert figures.kl == pytest.approx(1.4 / 22)
    assert figures.top1 == pytest.approx(19 / 22)


def test_a_degraded_store_is_due_again_after_a_while() -> None:
    store = watch(recheck_seconds=300)
    assert store.due(0), "nothing is known yet"
    store.add(BAD, 10)
    store.add(BAD, 10)
    assert not store.due(309)
    assert store.due(310)
    store.restart()
    store.add(GOOD, 310)
    assert store.state == "degraded", "one good answer is no proof"
    assert store.add(GOOD, 310)
    assert store.state == "ok"
    assert not store.due(10_000), "users' requests tell the rest"


def test_a_check_without_a_sample_is_tried_later() -> None:
    store = watch()
    store.postpone(100)
    assert not store.due(159)
    assert store.due(160)
