"""Free rows: pieces are taken and joined, and none is lost."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_runtime.tiers.spans import FreeSpans, Span


def test_one_piece_is_preferred() -> None:
    free = FreeSpans(10)
    a, b, c = free.take(2), free.take(2), free.take(6)
    assert (a, b, c) == (((0, 2),), ((2, 2),), ((4, 6),))
    assert free.take(1) is None
    assert a is not None
    assert c is not None
    free.give(a)
    free.give(c)
    assert free.take(5) == ((4, 5),)
    assert free.take(3) == ((0, 2), (9, 1)), "in the order of the rows"


def test_an_empty_slab_gives_nothing() -> None:
    free = FreeSpans(0)
    assert free.take(1) is None
    assert [*free] == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=60))
def test_rows_are_conserved(actions: list[tuple[bool, int]]) -> None:
    free = FreeSpans(20)
    taken: list[tuple[Span, ...]] = []
    for take, number in actions:
        if take:
            before = free.num_rows
            found = free.take(number)
            assert (found is None) == (number > before)
            if found is not None:
                assert sum(rows for _, rows in found) == number
                taken.append(found)
        elif taken:
            free.give(taken.pop(number % len(taken)))
        pieces = sorted([*free, *(span for spans in taken for span in spans)])
        rows = [row for start, size in pieces for row in range(start, start + size)]
        assert rows == list(range(20))
        edges = [*free]
        joined = all(sum(left) < right[0] for left, right in pairwise(edges))
        assert joined, "free neighbours are one piece"
