"""What a request needs stays in the arena from before it is read until it has its lease."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.slab import NUM_LEASES


@pytest.fixture
def arena() -> Arena:
    return Arena(torch.zeros((10, 1, 2, 1, 2)), np.zeros((NUM_LEASES, 2), np.int64))


def rows(count: int) -> torch.Tensor:
    return torch.ones((count, 1, 2, 1, 2))


def test_what_is_there_and_what_comes_in_makes_no_room(arena: Arena) -> None:
    assert arena.put("there", rows(4))
    with arena.holding(["there", "comes"]):
        assert arena.put("comes", rows(4))
        assert not arena.put("other", rows(4))
        assert arena.put("small", rows(2))
        assert arena.put("smaller", rows(1)), "what nobody holds still makes room"
        lease = arena.acquire(["there", "comes"])
        assert lease is not None
    assert arena.pinned_rows == 8, "the lease goes on"
    arena.end(lease, submitted=False)
    assert arena.pinned_rows == 0
    assert arena.put("other", rows(10))


def test_it_ends_with_the_block_however_it_ends(arena: Arena) -> None:
    def give_up() -> None:
        with arena.holding(["a", "never"]):
            assert arena.put("a", rows(4))
            assert arena.pinned_rows == 4
            raise TimeoutError

    with pytest.raises(TimeoutError):
        give_up()
    assert arena.pinned_rows == 0
    assert arena.put("never", rows(10)), "nobody waits for it any more"
    assert arena.pinned_rows == 0


def test_two_requests_hold_the_same_segment(arena: Arena) -> None:
    with arena.holding(["a"]):
        with arena.holding(["a"]):
            assert arena.put("a", rows(6))
        assert not arena.put("b", rows(6))
    assert arena.put("b", rows(6))


def test_an_erased_segment_is_gone_at_once_and_its_rows_when_it_is_let_go(arena: Arena) -> None:
    with arena.holding(["a"]):
        assert arena.put("a", rows(6))
        assert arena.discard(["a"]) == 1
        assert arena.resident(["a"]) == set()
        assert arena.acquire(["a"]) is None
        assert arena.used_rows == 6
    assert arena.used_rows == 0


def test_a_smaller_budget_waits_for_it(arena: Arena) -> None:
    with arena.holding(["a"]):
        assert arena.put("a", rows(6))
        arena.set_limits(0, {})
        assert arena.resident(["a"]) == {"a"}
    assert arena.used_rows == 0
