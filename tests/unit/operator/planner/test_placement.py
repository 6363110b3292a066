"""Placement: who gets which tier, what never happens, and how much work it is."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_operator.planner.placement import (
    GPU_GRANULE,
    SHARED_PART,
    PlacementPlan,
    PlacementSettings,
    PodFigures,
    StoreDemand,
    StorePlacement,
    plan_placement,
)
from inferscale_runtime.config import TierPlan

GIB = 1 << 30
SETTINGS = PlacementSettings(gpu_arena_bytes=8 * GIB, gpu_reserve_bytes=GIB)
POD = PodFigures("pod-0", 3.0, 32 * GIB, (9 * GIB,))


def tiers(plan: PlacementPlan) -> dict[str, str]:
    return {store.name: store.tier for store in plan.stores}


def placed(plan: PlacementPlan, name: str) -> StorePlacement:
    return next(store for store in plan.stores if store.name == name)


def plan(
    *stores: StoreDemand,
    previous: PlacementPlan | None = None,
    pods: tuple[PodFigures, ...] = (POD,),
    **changes: Any,
) -> PlacementPlan:
    return plan_placement(pods, stores, previous, replace(SETTINGS, **changes))


def test_the_hottest_per_byte_go_up() -> None:
    result = plan(
        StoreDemand("small-hot", 4 * GIB, heat=10),
        StoreDemand("large-warm", 20 * GIB, heat=15),
        StoreDemand("cold", 10 * GIB),
    )
    assert tiers(result) == {"small-hot": "gpu", "large-warm": "dram", "cold": "dram"}
    assert placed(result, "large-warm").gpu_bytes == 4 * GIB, "what is left of the GPU arena"
    assert placed(result, "cold").dram_bytes == 7 * GIB
    assert placed(result, "cold").gpu_bytes == 0
    assert result.metrics_fresh
    assert (result.dram_bytes, result.gpu_bytes) == (32 * GIB, 8 * GIB)
    assert result.age_seconds == 3


def test_what_does_not_fit_goes_to_disk_with_a_reason() -> None:
    result = plan(StoreDemand("hot", 40 * GIB, heat=9), StoreDemand("cold", 5 * GIB, heat=0.1))
    assert tiers(result) == {"hot": "gpu", "cold": "disk"}
    assert "hotter stores fill" in placed(result, "cold").reason


def test_priority_goes_before_heat_and_names_before_both() -> None:
    stores = (
        StoreDemand("busy", 31 * GIB, heat=100),
        StoreDemand("important", 31 * GIB, heat=0.1, priority=5),
    )
    assert tiers(plan(*stores, gpu_arena_bytes=0)) == {"busy": "disk", "important": "dram"}
    fixed = StoreDemand("fixed", 31 * GIB, placement="DRAM", priority=-1)
    result = plan(*stores, fixed, gpu_arena_bytes=0)
    assert tiers(result) == {"busy": "disk", "important": "disk", "fixed": "dram"}
    assert placed(result, "fixed").floor_bytes == 31 * GIB
    assert "asked for DRAM" in placed(result, "fixed").reason


def test_floors_come_first() -> None:
    result = plan(
        StoreDemand("busy", 40 * GIB, heat=100, priority=9),
        StoreDemand("quiet", 10 * GIB, floor_bytes=3 * GIB),
    )
    assert placed(result, "quiet").floor_bytes == placed(result, "quiet").dram_bytes == 3 * GIB
    assert placed(result, "busy").dram_bytes == 28 * GIB


def test_disk_by_name_gets_a_ceiling_and_no_share() -> None:
    result = plan(StoreDemand("archive", 4 * GIB, heat=50, placement="Disk"))
    archive = placed(result, "archive")
    assert (archive.tier, archive.dram_bytes, archive.gpu_bytes) == ("disk", 0, 0)
    assert archive.ceiling_bytes == 4 * GIB


def test_gpu_by_name_without_a_gpu_says_so() -> None:
    result = plan(StoreDemand("a", GIB, placement="GPU"), gpu_arena_bytes=0)
    assert placed(result, "a").tier == "dram"
    assert "no GPU arena" in placed(result, "a").reason
    assert result.gpu_bytes == 0


def test_gpus_of_a_pod_share_a_store() -> None:
    pod = replace(POD, gpu_free_bytes=(9 * GIB, 9 * GIB))
    result = plan(StoreDemand("a", 16 * GIB, heat=1), pods=(pod,), gpus_per_pod=2)
    assert placed(result, "a").gpu_bytes == 16 * GIB
    assert result.gpu_bytes == 8 * GIB, "per GPU"


def test_the_smallest_pod_and_gpu_count() -> None:
    second = PodFigures("pod-1", 1.0, 16 * GIB, (9 * GIB, 4 * GIB))
    result = plan(StoreDemand("a", GIB), pods=(POD, second))
    assert (result.dram_bytes, result.gpu_bytes) == (16 * GIB, 3 * GIB)


def test_the_gpu_budget_follows_only_large_changes() -> None:
    first = plan()
    assert first.gpu_bytes == 8 * GIB
    used = replace(POD, gpu_free_bytes=(GIB,), gpu_arena_bytes=8 * GIB)
    assert plan(previous=first, pods=(used,)).gpu_bytes == 8 * GIB, "its own use is not a shortage"
    less = plan(previous=first, pods=(replace(used, gpu_free_bytes=(GIB // 2,)),))
    assert less.gpu_bytes == 8 * GIB - GIB // 2, "vLLM's reserve is kept at once"
    more = plan(previous=less, pods=(replace(used, gpu_free_bytes=(GIB,)),))
    assert more.gpu_bytes == less.gpu_bytes, "6 % more is not worth a move"
    none = plan(previous=first, pods=(replace(used, gpu_free_bytes=(0,), gpu_arena_bytes=0),))
    assert none.gpu_bytes == 0
    assert plan(previous=none).gpu_bytes == 8 * GIB


def test_a_push_needs_more_heat_than_the_threshold() -> None:
    a, b = StoreDemand("a", 8 * GIB, heat=10), StoreDemand("b", 8 * GIB, heat=9)
    first = plan(a, b)
    assert tiers(first) == {"a": "gpu", "b": "dram"}
    assert tiers(plan(a, replace(b, heat=12.4), previous=first)) == tiers(first)
    assert tiers(plan(a, replace(b, heat=12.6), previous=first)) == {"a": "dram", "b": "gpu"}


def test_a_store_that_cools_down_stays_while_there_is_room() -> None:
    first = plan(StoreDemand("a", 4 * GIB, heat=1))
    assert tiers(plan(StoreDemand("a", 4 * GIB), previous=first)) == {"a": "gpu"}
    assert tiers(plan(StoreDemand("a", 4 * GIB))) == {"a": "dram"}


@pytest.mark.parametrize(
    ("pods", "reason"),
    [
        ((), "no ready pod"),
        (
            (POD, replace(POD, name="pod-1", age_seconds=61)),
            "pod pod-1: figures are older than 60 s",
        ),
        ((replace(POD, gpu_free_bytes=()),), "pod pod-0: no GPU figures"),
        ((replace(POD, dram_capacity_bytes=None),), "pod pod-0: no arena figures"),
    ],
)
def test_stale_figures_change_nothing(pods: tuple[PodFigures, ...], reason: str) -> None:
    first = plan(StoreDemand("a", 4 * GIB, heat=1))
    kept = plan(StoreDemand("b", GIB, heat=5), previous=first, pods=pods)
    assert reason in kept.reason
    assert kept == replace(first, metrics_fresh=False, reason=kept.reason)
    assert kept.document() == first.document()
    nothing = plan(StoreDemand("b", GIB), pods=pods)
    assert nothing.document() == {"version": 1, "dram_bytes": None, "gpu_bytes": 0, "stores": {}}


def test_missing_gpu_figures_do_not_matter_without_a_gpu_arena() -> None:
    pod = replace(POD, gpu_free_bytes=())
    assert plan(StoreDemand("a", GIB), pods=(pod,), gpu_arena_bytes=0).metrics_fresh


def test_names_are_unique() -> None:
    with pytest.raises(ValueError, match="one name"):
        plan(StoreDemand("a", 1), StoreDemand("a", 2))


DEMANDS = st.lists(
    st.builds(
        StoreDemand,
        name=st.integers(0, 30).map(lambda n: f"s{n}"),
        num_bytes=st.integers(0, 20) | st.integers(0, 40 * GIB),
        heat=st.floats(0, 100, allow_nan=False),
        placement=st.sampled_from(["Auto", "Auto", "Auto", "GPU", "DRAM", "Disk"]),
        priority=st.integers(-2, 2),
        floor_bytes=st.just(0) | st.integers(0, 20 * GIB),
    ),
    max_size=12,
    unique_by=lambda store: store.name,
)
PODS = st.lists(
    st.builds(
        PodFigures,
        name=st.integers(0, 5).map(lambda n: f"p{n}"),
        age_seconds=st.floats(0, 90, allow_nan=False),
        dram_capacity_bytes=st.none() | st.integers(0, 64 * GIB),
        gpu_free_bytes=st.lists(st.integers(0, 20 * GIB), max_size=2).map(tuple),
        gpu_arena_bytes=st.integers(0, 10 * GIB),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda pod: pod.name,
)


@settings(deadline=None)
@given(DEMANDS, PODS, DEMANDS, st.randoms(use_true_random=False))
def test_rules_that_always_hold(
    stores: list[StoreDemand],
    pods: list[PodFigures],
    earlier: list[StoreDemand],
    rng: random.Random,
) -> None:
    previous = plan(*earlier)
    result = plan_placement(pods, stores, previous, SETTINGS)
    if not result.metrics_fresh:
        assert result == replace(previous, metrics_fresh=False, reason=result.reason)
        return
    capacity = min(pod.dram_capacity_bytes or 0 for pod in pods)
    assert result.dram_bytes == capacity
    assert sum(s.dram_bytes for s in result.stores) <= capacity - capacity // SHARED_PART
    assert sum(s.floor_bytes for s in result.stores) <= capacity
    assert sum(s.gpu_bytes for s in result.stores) <= result.gpu_bytes
    for pod in pods:
        room = min(pod.gpu_free_bytes) + pod.gpu_arena_bytes - SETTINGS.gpu_reserve_bytes
        assert result.gpu_bytes <= max(0, room), "vLLM's reserve is kept"
    demands = {store.name: store for store in stores}
    assert [s.name for s in result.stores] == sorted(demands)
    for store in result.stores:
        assert 0 <= store.gpu_bytes <= store.dram_bytes
        assert store.floor_bytes <= store.dram_bytes <= demands[store.name].num_bytes
        assert store.reason
        if demands[store.name].placement == "Disk":
            assert store.tier == "disk"
        if demands[store.name].placement == "DRAM":
            assert store.tier != "gpu"
    TierPlan.model_validate_json(json.dumps(result.document()))
    rng.shuffle(stores)
    rng.shuffle(pods)
    assert plan_placement(pods, stores, previous, SETTINGS) == result, "order does not matter"
    again = plan_placement(pods, stores, result, SETTINGS)
    assert again == result, "the same inputs change nothing"


@settings(max_examples=200, deadline=None)
@given(DEMANDS, st.data())
def test_small_changes_of_heat_move_nothing(stores: list[StoreDemand], data: st.DataObject) -> None:
    first = plan(*stores)
    noise = st.floats(0.9, 1.1)
    jittered = [replace(store, heat=store.heat * data.draw(noise)) for store in stores]
    second = plan(*jittered, previous=first)
    moved = [
        (a, b)
        for a, b in zip(first.stores, second.stores, strict=True)
        if replace(a, reason="") != replace(b, reason="")
    ]
    assert moved == [], "1.1 / 0.9 is below the threshold of 1.25"


@settings(deadline=None)
@given(DEMANDS, st.data())
def test_who_loses_room_loses_it_to_a_hotter_or_more_important_store(
    stores: list[StoreDemand], data: st.DataObject
) -> None:
    first = plan(*stores)
    heats = st.floats(0, 100, allow_nan=False)
    second_stores = [replace(store, heat=data.draw(heats)) for store in stores]
    second = plan(*second_stores, previous=first)
    now = {store.name: store for store in second_stores}

    def density(name: str) -> float:
        return now[name].heat / max(1, now[name].num_bytes)

    gained = [
        after.name
        for before, after in zip(first.stores, second.stores, strict=True)
        if after.dram_bytes > before.dram_bytes
    ]
    for before, after in zip(first.stores, second.stores, strict=True):
        if after.dram_bytes < before.dram_bytes:
            limit = density(after.name) * (1 + SETTINGS.threshold)
            assert any(density(name) > limit for name in gained)


def count_calls(num_stores: int) -> int:
    """Function calls of one plan: a measure of its work that no machine's speed enters."""
    rng = random.Random(num_stores)
    stores = [
        StoreDemand(f"s{n}", rng.randrange(GIB), rng.random() * 10) for n in range(num_stores)
    ]
    first = plan_placement([POD], stores, None, SETTINGS)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        plan_placement([POD], stores, first, SETTINGS)
    finally:
        sys.setprofile(None)
    return calls


def test_work_grows_with_the_number_of_stores_and_not_its_square() -> None:
    small, large = count_calls(500), count_calls(5000)
    assert large < 12 * small
    assert large < 100 * 5000, "far below what a second allows"


def test_gpu_budgets_are_whole_granules() -> None:
    pod = replace(POD, gpu_free_bytes=(5 * GIB + 12345,))
    assert plan(pods=(pod,)).gpu_bytes == 4 * GIB // GPU_GRANULE * GPU_GRANULE
