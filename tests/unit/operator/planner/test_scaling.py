"""The decision about a size, under a simulated clock."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_operator.planner.load import Load
from inferscale_operator.planner.scaling import (
    ScalingDecision,
    ScalingSettings,
    ScalingState,
    decide_scaling,
)

START = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = ScalingSettings(minimum=1, maximum=8, requests=8, down_seconds=300)
SLEEPY = replace(SETTINGS, idle_seconds=60.0)


class Clock:
    """Repeats decisions; the size is what was decided, as in a cluster."""

    def __init__(self, settings: ScalingSettings = SETTINGS, replicas: int = 1) -> None:
        self.settings, self.replicas = settings, replicas
        self.now, self.state = START, ScalingState()
        self.changes: list[tuple[float, int]] = []

    def look(self, load: Load, seconds: float = 0, *, settled: bool = True) -> ScalingDecision:
        self.now += timedelta(seconds=seconds)
        decided = decide_scaling(
            self.now, self.replicas, self.settings, load, self.state, settled=settled
        )
        if decided.replicas != self.replicas:
            self.changes.append(((self.now - START).total_seconds(), decided.replicas))
            assert decided.reason
        self.replicas, self.state = decided.replicas, decided.state
        return decided

    def last(self, load: Load, seconds: float, step: float = 10.0) -> None:
        """Looks every ``step`` seconds, as long as that takes."""
        for _ in range(int(seconds / step)):
            self.look(load, step)


def loaded(requests: float, ready: int = 1, **more: Any) -> Load:
    return Load(ready=ready, requests=requests, answered=1.0 if requests else 0.0, **more)


@pytest.mark.parametrize(
    ("requests", "size"), [(0, 1), (8, 1), (8.7, 1), (9, 2), (16, 2), (17, 3), (1000, 8)]
)
def test_up_at_once_to_what_the_requests_need(requests: float, size: int) -> None:
    clock = Clock()
    clock.look(loaded(requests))
    assert clock.replicas == size


@pytest.mark.parametrize(
    ("settings", "load", "size"),
    [
        ({"kv_cache": 0.5}, {"kv_cache": 0.9}, 2),
        ({"kv_cache": 0.5}, {"kv_cache": 0.52}, 1),
        ({"ttft_seconds": 2.0}, {"ttft_p95_seconds": 3.0}, 2),
        ({"ttft_seconds": 2.0}, {"ttft_p95_seconds": 100.0}, 2),  # at most doubled
        ({"ttft_seconds": 2.0}, {"ttft_p95_seconds": None}, 1),
        ({"kv_cache": 0.5, "ttft_seconds": 2.0}, {"kv_cache": 1.0, "ttft_p95_seconds": 0.1}, 2),
        ({}, {"held": 30}, 4),
    ],
)
def test_the_largest_wish_wins(settings: Any, load: Any, size: int) -> None:
    clock = Clock(replace(SETTINGS, **settings))
    clock.look(loaded(1, **load))
    assert clock.replicas == size


def test_a_growing_queue_is_met_before_the_cold_start_is_over() -> None:
    slow = replace(SETTINGS, cold_start_seconds=60.0)
    growing = loaded(6, growth=0.1)  # 12 in a minute, 8 is what one carries
    quick = Clock()
    quick.look(growing)
    ahead = Clock(slow)
    ahead.look(growing)
    assert (quick.replicas, ahead.replicas) == (1, 2)
    steep = Clock(slow, replicas=2)
    steep.look(loaded(6, growth=100.0))
    assert steep.replicas == 4  # a trend at most doubles the size


def test_down_only_after_the_whole_time_and_to_the_most_that_was_needed() -> None:
    clock = Clock(replicas=6)
    clock.last(loaded(8, ready=6), 150)
    clock.look(loaded(24, ready=6), 10)
    clock.last(loaded(8, ready=6), 130)
    assert clock.replicas == 6
    clock.last(loaded(8, ready=6), 20)
    assert clock.changes == [(310, 3)]
    clock.last(loaded(8, ready=3), 290)
    assert clock.replicas == 3
    clock.last(loaded(8, ready=3), 20)
    assert clock.replicas == 1


def test_a_wish_for_the_present_size_starts_the_time_anew() -> None:
    clock = Clock(replicas=2)
    clock.last(loaded(1, ready=2), 290)
    clock.look(loaded(16, ready=2), 5)
    clock.last(loaded(1, ready=2), 290)
    assert clock.replicas == 2


def test_up_can_be_told_to_wait() -> None:
    clock = Clock(replace(SETTINGS, up_seconds=30))
    clock.look(loaded(80))
    assert clock.look(loaded(20), 20).next_seconds == 10
    assert clock.replicas == 1
    clock.look(loaded(80), 10)
    assert clock.changes == [(30, 3)]  # the least that was wished for all the time


@pytest.mark.parametrize("age", [31.0, math.inf])
@pytest.mark.parametrize("requests", [0, 1000])
def test_old_figures_change_nothing(age: float, requests: int) -> None:
    clock = Clock(replace(SLEEPY, down_seconds=0), replicas=4)
    clock.last(loaded(requests, ready=4, age_seconds=age), 3600)
    assert clock.changes == []


def test_time_without_figures_does_not_count() -> None:
    clock = Clock(replicas=2)
    clock.last(loaded(0, ready=2), 290)
    clock.look(loaded(0, ready=2, age_seconds=99), 10)
    clock.last(loaded(0, ready=2), 290)
    assert clock.replicas == 2


def test_nothing_is_taken_away_in_a_rollout() -> None:
    clock = Clock(replace(SLEEPY, maximum=2), replicas=3)
    for _ in range(100):
        clock.look(loaded(0, ready=3), 10, settled=False)
    assert clock.changes == []
    clock.look(loaded(30, ready=3), 10, settled=False)
    assert clock.replicas == 3
    clock.look(loaded(0, ready=3), 10)
    assert clock.replicas == 2


def test_a_new_server_is_not_taken_away_before_it_answers() -> None:
    clock = Clock(replace(SLEEPY, down_seconds=0), replicas=3)
    clock.last(Load(ready=0), 3600)
    assert clock.changes == []


@pytest.mark.parametrize(("replicas", "size"), [(1, 2), (9, 6), (4, 4)])
def test_limits_hold_at_once_and_without_figures(replicas: int, size: int) -> None:
    clock = Clock(replace(SETTINGS, minimum=2, maximum=6), replicas)
    clock.look(loaded(32, ready=4, age_seconds=math.inf))
    assert clock.replicas == size


def test_it_falls_asleep_when_nobody_asks_and_wakes_for_held_requests() -> None:
    clock = Clock(SLEEPY)
    clock.last(loaded(0), 50)
    clock.look(Load(ready=1, answered=1.0), 10)  # came and went between two looks
    clock.last(loaded(0), 60)
    assert clock.replicas == 1
    clock.look(loaded(0), 10)
    assert clock.replicas == 0
    clock.last(Load(ready=0), 3600)
    assert clock.replicas == 0
    clock.look(Load(ready=0, held=20), 1)
    assert clock.replicas == 1
    clock.look(Load(ready=0, held=20), 1)
    assert clock.replicas == 3


@pytest.mark.parametrize(
    "load", [loaded(1), loaded(0, held=1), Load(ready=1, answered=None), Load(ready=0)]
)
def test_it_stays_awake(load: Load) -> None:
    clock = Clock(SLEEPY)
    clock.last(load, 600)
    assert clock.replicas >= 1


def test_a_persons_zero_stays() -> None:
    clock = Clock(SETTINGS, replicas=0)
    clock.last(Load(ready=0, held=5), 600)
    assert clock.changes == []


def test_a_spec_that_no_longer_sleeps_wakes_the_model() -> None:
    clock = Clock(SLEEPY, replicas=2)
    clock.last(loaded(0, ready=2), 100)
    assert clock.replicas == 0
    clock.settings = SETTINGS
    clock.look(Load(ready=0), 10)
    assert clock.replicas == 2


def test_without_a_provider_a_model_wakes_in_its_last_size() -> None:
    clock = Clock(replace(SLEEPY, follows_load=False, wakes_in_last_size=True), replicas=3)
    clock.last(loaded(0, ready=3), 100)
    assert clock.replicas == 0
    clock.replicas = 1  # the activator wakes it
    clock.look(Load(ready=0, held=1), 1)
    assert clock.replicas == 3
    clock.replicas = 2  # a person's choice is left alone
    clock.last(loaded(99, ready=2), 600)
    assert clock.replicas == 2


def test_beside_another_autoscaler_only_its_smallest_size_falls_asleep() -> None:
    clock = Clock(replace(SLEEPY, follows_load=False, sleeps_from=1), replicas=2)
    clock.last(loaded(0, ready=2), 600)
    assert clock.changes == []
    clock.replicas = 1
    clock.last(loaded(0), 100)
    assert clock.replicas == 0


loads = st.builds(
    Load,
    ready=st.integers(0, 8),
    age_seconds=st.sampled_from([0.0, 10.0, 60.0, math.inf]),
    requests=st.floats(0, 200),
    kv_cache=st.floats(0, 8),
    ttft_p95_seconds=st.none() | st.floats(0, 100),
    held=st.integers(0, 50),
    growth=st.floats(0, 10),
    answered=st.none() | st.floats(0, 10),
)
limits = st.builds(
    ScalingSettings,
    minimum=st.integers(1, 3),
    maximum=st.integers(3, 8),
    requests=st.integers(1, 20),
    kv_cache=st.none() | st.floats(0.1, 1),
    ttft_seconds=st.none() | st.floats(0.1, 10),
    up_seconds=st.sampled_from([0.0, 20.0]),
    down_seconds=st.sampled_from([0.0, 60.0, 300.0]),
    idle_seconds=st.none() | st.sampled_from([30.0, 120.0]),
    cold_start_seconds=st.floats(0, 300),
)
looks = st.lists(st.tuples(loads, st.integers(1, 60), st.booleans()), min_size=1, max_size=40)


@settings(deadline=None)
@given(limits=limits, looks=looks, start=st.integers(0, 10))
def test_whatever_happens(
    limits: ScalingSettings, looks: list[tuple[Load, int, bool]], start: int
) -> None:
    """Limits, reasons and pauses hold, and what is remembered fits into a status."""
    clock = Clock(limits, start)
    for load, seconds, settled in looks:
        before = clock.replicas
        clock.look(load, seconds, settled=settled)
        after = clock.replicas
        if after < before:
            assert settled
            assert load.fresh or before > limits.maximum
            assert load.ready > 0 or before > limits.maximum
        if after != before:
            assert limits.minimum <= after <= limits.maximum or after == 0
        if after == 0 and before > 0:
            assert limits.idle_seconds is not None
            assert load.requests == load.held == load.answered == 0
        for value in (clock.state.up_to, clock.state.down_to, clock.state.awake_replicas):
            assert value is None or value >= 0


@settings(deadline=None)
@given(
    busy=st.lists(st.floats(0, 100), min_size=1, max_size=30),
    calm=st.floats(0, 100),
)
def test_a_steady_load_comes_to_rest(busy: list[float], calm: float) -> None:
    clock = Clock(replace(SETTINGS, maximum=100))
    for requests in busy:
        clock.look(loaded(requests, ready=clock.replicas), 10)
    clock.last(loaded(calm, ready=clock.replicas), 700)
    rest = clock.replicas
    assert calm / 8 <= rest * 1.1 + 1e-9
    clock.last(loaded(calm, ready=rest), 1200)
    assert clock.replicas == rest
