"""Who makes room: recency, floors, ceilings and tiers; and how near to an offline LRU it comes."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch

from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.arena_use import ByteLimits
from inferscale_runtime.tiers.eviction import EvictionPolicy, Resident, StoreLimits
from inferscale_runtime.tiers.slab import NUM_LEASES


def policy_with(budget: int, *entries: tuple[str, str, int]) -> EvictionPolicy:
    policy = EvictionPolicy(budget)
    for key, store, rows in entries:
        policy.add(Resident(key, store, (), rows))
    return policy


def keys(victims: list[Resident] | None) -> list[str] | None:
    return None if victims is None else [victim.key for victim in victims]


def test_the_oldest_go_first_across_stores() -> None:
    policy = policy_with(6, ("a", "x", 2), ("b", "y", 2), ("c", "x", 2))
    assert keys(policy.victims_for("y", 1)) == ["a"]
    assert keys(policy.victims_for("y", 3)) == ["a", "b"]
    assert keys(policy.victims_for("y", 7)) is None
    assert policy.rows == 6, "choosing changes nothing"


def test_a_floor_keeps_others_out_but_not_the_store_itself() -> None:
    policy = policy_with(6, ("a", "x", 2), ("b", "x", 2), ("c", "y", 2))
    policy.configure(6, {"x": StoreLimits(floor=3)})
    assert keys(policy.victims_for("y", 2)) == ["c"], "a would leave x with 2 of 3"
    assert keys(policy.victims_for("y", 3)) is None
    assert keys(policy.victims_for("x", 4)) == ["a", "b"]


def test_a_ceiling_is_paid_by_its_own_store() -> None:
    policy = policy_with(100, ("a", "x", 2), ("b", "y", 2), ("c", "x", 2))
    policy.configure(100, {"x": StoreLimits(ceiling=4)})
    assert keys(policy.victims_for("x", 1)) == ["a"]
    assert keys(policy.victims_for("x", 5)) is None
    assert keys(policy.victims_for("y", 50)) == []


def test_disk_stores_go_before_older_segments_of_others() -> None:
    policy = policy_with(4, ("old", "x", 2), ("new", "cold", 2))
    policy.configure(4, {"cold": StoreLimits(tier="disk")})
    assert keys(policy.victims_for("x", 1)) == ["new"]


def test_shrinking_keeps_floors_until_the_unpinned_alone_are_too_many() -> None:
    policy = policy_with(10, ("a", "x", 3), ("b", "x", 3))
    held = Resident("c", "y", (), 4, pins=1)
    policy.add(held)
    policy.configure(8, {"x": StoreLimits(floor=6)})
    assert keys(policy.overflow()) == [], "y drains instead"
    policy.configure(5, {"x": StoreLimits(floor=5)})
    assert keys(policy.overflow()) == ["a"], "6 unpinned rows do not fit into 5"


def test_pinned_segments_are_never_chosen() -> None:
    policy = policy_with(4, ("a", "x", 2), ("b", "x", 2))
    entry = next(iter(policy._stores["x"].idle))
    policy.pin(entry)
    policy.pin(entry)
    policy.configure(0, {})
    assert keys(policy.overflow()) == ["b"]
    policy.unpin(entry)
    assert keys(policy.victims_for("x", 1)) is None
    policy.unpin(entry)
    assert keys(policy.overflow()) == ["b", "a"], "in the order of last use"


def test_stores_without_segments_and_limits_are_forgotten() -> None:
    policy = policy_with(10, ("a", "x", 2))
    policy.configure(10, {"gone": StoreLimits(floor=1)})
    policy.configure(10, {})
    assert policy.stores == ("x",)


def offline_lru(trace: list[list[tuple[str, int]]], capacity: int) -> float:
    """Hit rate of a plain LRU over segments, written without the arena's code."""
    cache: OrderedDict[str, int] = OrderedDict()
    used = hits = total = 0
    for request in trace:
        for key, size in request:
            total += 1
            if key in cache:
                hits += 1
                cache.move_to_end(key)
                continue
            while used + size > capacity:
                used -= cache.popitem(last=False)[1]
            cache[key] = size
            used += size
    return hits / total


def test_hit_rate_is_that_of_an_offline_lru() -> None:
    # 300 users of 20 facts, a Zipf law over users, 2,000 requests for 8 facts each, a quarter of
    # all facts fits.
    rng = np.random.default_rng(7)
    sizes = rng.integers(15, 45, (300, 20))
    weights = 1 / np.arange(1, 301)
    users = rng.choice(300, size=2000, p=weights / weights.sum())
    trace = [
        [(f"{user}/{fact}", int(sizes[user, fact])) for fact in rng.choice(20, 8, replace=False)]
        for user in users
    ]
    capacity = int(sizes.sum()) // 4
    slab = torch.zeros((capacity, 1, 2, 1, 1))
    leases = np.zeros((NUM_LEASES, 2), np.int64)
    arena = Arena(slab, leases)
    arena.set_limits(None, {"x": ByteLimits()})
    running = []
    for request in trace:
        wanted = [key for key, _ in request]
        found = arena.look_up(wanted, store="x")
        for key, size in request:
            if key not in found:
                assert arena.put(key, torch.zeros((size, 1, 2, 1, 1)), store="x")
        lease = arena.acquire(wanted)
        assert lease is not None
        running.append(lease)
        if len(running) == 16:  # requests overlap
            arena.end(running.pop(0), submitted=False)
    for lease in running:
        arena.end(lease, submitted=False)
    figures = arena.stats.snapshot()["x"]
    assert figures.hits + figures.misses == 16_000
    rate = figures.hits / 16_000
    expected = offline_lru(trace, capacity)
    assert 0.2 < expected < 0.9, "the trace tests something"
    assert abs(rate - expected) < 0.05
    assert arena.pinned_rows == 0
    arena.set_limits(0, {})
    assert arena.used_rows == 0
