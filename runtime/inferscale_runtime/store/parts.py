"""How a user's facts are cut into tables, so that a small change rewrites a small file (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from inferscale_runtime.store.records import Fact

PART_FACTS = 256
"""Most facts of one table, below 16,384 facts (measured: a table of 256 facts with embeddings of
384 numbers has 0.4 MB and is written in milliseconds)."""
_MOST_PARTS = 64

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Part(Generic[_R]):
    """Facts ``[start, end)`` are one table.

    Attributes:
        start: First fact.
        end: Behind the last one.
        kept: The old table that had exactly so many facts at this place, or None; whether it holds
            the same content is for the caller to compare.
    """

    start: int
    end: int
    kept: _R | None


def plan_parts(facts: Sequence[Fact], old: Sequence[tuple[_R, Sequence[Fact]]]) -> list[Part[_R]]:
    """Cuts facts into tables along the old borders.

    A fact stays in the table that it was in, a new one goes to the table of the fact before it.
    Tables that grew too large are cut, neighbours that shrank together to less than half of one
    are joined.

    Args:
        facts: All facts, in order.
        old: The old tables and their facts, in order.

    Returns:
        The parts in order; they cover all facts, and without facts there is one empty part.
    """
    limit = max(PART_FACTS, -(-len(facts) // _MOST_PARTS))
    place = {fact.id: n for n, (_, rows) in enumerate(old) for fact in rows}
    ends: list[int] = []
    label = -1
    for at, fact in enumerate(facts):
        mine = place.get(fact.id, label)
        if mine > label and at:
            ends.append(at)
        label = max(label, mine)
    spans: list[tuple[int, int]] = []
    for start, end in zip([0, *ends], [*ends, len(facts)], strict=True):
        if spans and end - spans[-1][0] <= limit // 2:
            spans[-1] = (spans[-1][0], end)
            continue
        spans += [(a, min(a + limit, end)) for a in range(start, end, limit)] or [(start, end)]
    first = {rows[0].id: (ref, rows) for ref, rows in old if rows}
    parts = []
    for start, end in spans:
        ref, rows = first.get(facts[start].id, (None, ())) if end > start else (None, ())
        same = ref is not None and tuple(rows) == tuple(facts[start:end])
        parts.append(Part(start, end, ref if same else None))
    return parts
