"""Counters and heat."""

from __future__ import annotations

import pytest

from inferscale_runtime.tiers.stats import StoreFigures, TierStats


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_counts_by_store() -> None:
    stats = TierStats(Clock())
    stats.looked_up("a", 3, 1)
    stats.looked_up("a", 2, 0)
    stats.staged("a", 1, 4096, 0.25)
    stats.evicted("b")
    found = stats.snapshot()
    assert list(found) == ["a", "b"]
    a = found["a"]
    assert (a.hits, a.misses, a.staged_segments, a.staged_bytes) == (5, 1, 1, 4096)
    assert a.staging_seconds == 0.25
    assert found["b"] == StoreFigures(evictions=1)


def test_heat_halves_in_its_half_life() -> None:
    clock = Clock()
    stats = TierStats(clock, half_life_seconds=10)
    stats.looked_up("a", 50, 50)
    first = stats.snapshot()["a"].heat
    clock.now = 10
    assert stats.snapshot()["a"].heat == pytest.approx(first / 2, rel=1e-4)
    clock.now = 30
    assert stats.snapshot()["a"].heat == pytest.approx(first / 8, rel=1e-4)


@pytest.mark.parametrize("hits", [0, 4])
def test_heat_of_steady_requests_is_their_rate(hits: int) -> None:
    clock = Clock()
    stats = TierStats(clock, half_life_seconds=20)
    for _ in range(2000):
        clock.now += 0.1
        stats.looked_up("a", hits, 4 - hits)
    assert stats.snapshot()["a"].heat == pytest.approx(40, rel=0.01), "segments per second"
