"""What a deletion or correction takes along (pure; design section 5, dependencies)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from inferscale_runtime.store.records import Fact, Segment, Turn


def affected_by(
    deleted_fact_ids: Collection[str],
    deleted_turn_ids: Collection[str],
    segments: Mapping[str, Segment],
) -> frozenset[str]:
    """Finds the facts whose stored KV read something that was deleted or changed.

    One step is enough: a segment depends on the tokens of its context, not on the KV that is stored
    for those facts.

    Args:
        deleted_fact_ids: Facts that were deleted or changed.
        deleted_turn_ids: Turns that were deleted or changed.
        segments: Fact id -> segment, of one fingerprint.

    Returns:
        Ids of the dependent facts; a deleted fact is among them only if it depends on another.
    """
    facts, turns = frozenset(deleted_fact_ids), frozenset(deleted_turn_ids)
    if not facts and not turns:
        return frozenset()
    return frozenset(
        fact_id
        for fact_id, segment in segments.items()
        if not facts.isdisjoint(segment.context_fact_ids)
        or not turns.isdisjoint(segment.context_turn_ids)
    )


def gone_facts(old: Iterable[Fact], new: Iterable[Fact]) -> frozenset[str]:
    """Ids of facts that are deleted, or whose text is another one now."""
    texts = {fact.id: fact.text for fact in new}
    return frozenset(fact.id for fact in old if texts.get(fact.id) != fact.text)


def gone_turns(old: Iterable[Turn], new: Iterable[Turn]) -> frozenset[str]:
    """Ids of turns that are deleted, or whose speaker or text is another one now."""
    texts = {turn.id: (turn.speaker, turn.text) for turn in new}
    return frozenset(turn.id for turn in old if texts.get(turn.id) != (turn.speaker, turn.text))
