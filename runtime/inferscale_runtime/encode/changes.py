"""What has to be encoded for one user, and what may no longer be injected (pure).

A new fact does not make older segments stale. A deleted or changed fact or turn takes every segment
that had it in its context out of injection, under every fingerprint (design section 5,
dependencies).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from inferscale_runtime.encode.policies import Context, ContextPolicy
from inferscale_runtime.fingerprint import segment_key
from inferscale_runtime.prompt.template import Template
from inferscale_runtime.store.dependents import affected_by, gone_facts, gone_turns
from inferscale_runtime.store.records import Fact, Segment, Turn, UserMemory, tombstone

_I = TypeVar("_I", Fact, Turn)


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """One fact to read.

    Attributes:
        fact: The fact.
        key: Key of the segment it will have.
        token_ids: The fact's tokens; their rows are kept.
        context: What is read before it, already cut to the model's length.
        prompt_ids: Preamble, context and fact.
    """

    fact: Fact
    key: str
    token_ids: tuple[int, ...]
    context: Context
    prompt_ids: tuple[int, ...]


def merge_memory(
    user: str,
    old: UserMemory | None,
    facts: tuple[Fact, ...],
    turns: tuple[Turn, ...],
    embedder: str,
    origins: frozenset[str] = frozenset({""}),
) -> tuple[UserMemory, list[int]]:
    """Replaces the facts and turns of some origins and drops what depended on those that are gone.

    Facts and turns of other origins stay, also under the same id. What was deleted by somebody
    else, or is hidden by another origin's fact of the same id, does not come back; a tombstone is
    kept for as long as the source still brings it.

    Args:
        user: User id.
        old: What the store holds, or None.
        facts: All facts of the source now, each of one of the origins.
        turns: All turns of the source now, each of one of the origins.
        embedder: Name of the embedder; another one than before makes all embeddings new.
        origins: What is replaced: ``""`` for an encode input, else the name of a tool.

    Returns:
        The memory to commit, and which rows of its embeddings are still to be computed (zero now).
    """
    if old is None:
        empty = np.zeros((len(facts), 0), np.float32)
        return UserMemory(user, 0, facts, turns, embedder, empty), list(range(len(facts)))
    merged = _merge_origins(old, facts, turns, origins)
    facts, turns = merged.facts, merged.turns
    gone = gone_facts(old.facts, facts)
    without = gone_turns(old.turns, turns)
    encodings = {}
    for digest, segments in old.encodings.items():
        dropped = gone | affected_by(gone, without, segments)
        encodings[digest] = {i: s for i, s in segments.items() if i not in dropped}
    rows: dict[str, npt.NDArray[np.float32]] = {}
    if old.embedder == embedder and old.embeddings.shape[1]:
        rows = dict(zip((f.id for f in old.facts), old.embeddings, strict=True))
    todo = [n for n, fact in enumerate(facts) if fact.id in gone or fact.id not in rows]
    missing = set(todo)
    width = old.embeddings.shape[1] if rows else 0
    embeddings = np.zeros((len(facts), width), np.float32)
    for n, fact in enumerate(facts):
        if n not in missing:
            embeddings[n] = rows[fact.id]
    merged = replace(merged, embedder=embedder, embeddings=embeddings, encodings=encodings)
    return merged, todo


def _merge_origins(
    old: UserMemory, facts: tuple[Fact, ...], turns: tuple[Turn, ...], origins: frozenset[str]
) -> UserMemory:
    """Facts, turns and tombstones after a source has brought all it has."""
    other_turns = {turn.id: turn for turn in old.turns if turn.origin not in origins}
    other_facts = {fact.id: fact for fact in old.facts if fact.origin not in origins}
    stones = {stone for stone in old.tombstones if stone.origin not in origins}

    def admitted(kind: str, brought: tuple[_I, ...], others: Container[str]) -> dict[str, _I]:
        """What may come in of what the source has; the rest gets a tombstone."""
        found: dict[str, _I] = {}
        for item in brought:
            stone = tombstone(kind, item.origin, old.user, item.id)
            if stone in old.tombstones or item.id in others:
                stones.add(stone)
            else:
                found[item.id] = item
        return found

    new_turns = admitted("turn", turns, other_turns)
    new_facts = admitted("fact", facts, other_facts)
    lost = {turn.id for turn in (*old.turns, *turns)} - new_turns.keys() - other_turns.keys()
    return replace(
        old,
        facts=tuple(
            replace(fact, turn_id=None) if fact.turn_id in lost else fact
            for fact in (*new_facts.values(), *other_facts.values())
        ),
        turns=(*new_turns.values(), *other_turns.values()),
        tombstones=frozenset(stones),
    )


def plan_encoding(
    memory: UserMemory,
    template: Template,
    preamble: Sequence[int],
    policy: ContextPolicy,
    fingerprint: str,
    max_tokens: int,
) -> tuple[list[EncodePlan], list[Fact]]:
    """Lists the facts that have no valid segment.

    Args:
        memory: The user's memory with embeddings.
        template: Tokenises facts and turns.
        preamble: Preamble tokens.
        policy: Chooses each fact's context.
        fingerprint: Digest of the fingerprint.
        max_tokens: Longest prompt that the engine reads, in tokens.

    Returns:
        What to encode, and the facts that do not fit even without context.
    """
    segments: Mapping[str, Segment] = memory.encodings.get(fingerprint, {})
    tokens: dict[str, tuple[int, ...]] = {}
    fact_texts = {fact.id: fact.text for fact in memory.facts}
    turns = {turn.id: turn for turn in memory.turns}

    @cache
    def turn_ids(identity: str) -> tuple[int, ...]:
        turn = turns[identity]
        return tuple(template.tokenize(f"{turn.speaker}: {turn.text}\n"))

    def fact_ids(identity: str) -> tuple[int, ...]:
        if identity not in tokens:
            tokens[identity] = tuple(template.fact_token_ids(fact_texts[identity]))
        return tokens[identity]

    plans, too_long = [], []
    for index, fact in enumerate(memory.facts):
        ids = fact_ids(fact.id)
        old = segments.get(fact.id)
        # Neighbours change with every new fact, which does not make older segments stale; any other
        # context changes only when what it names has changed or moved.
        if old is not None and old.token_ids == ids and policy.needs_embeddings:
            continue
        if len(preamble) + len(ids) > max_tokens:
            too_long.append(fact)
            continue
        chosen = policy.select(index, memory.facts, memory.turns, memory.embeddings)
        parts = [("turn", i, turn_ids(i)) for i in chosen.turn_ids]
        parts += [("fact", i, fact_ids(i)) for i in chosen.fact_ids]
        room = max_tokens - len(preamble) - len(ids)
        # The nearest context stands last and matters most, so the front is cut.
        while sum(len(part[2]) for part in parts) > room:
            parts.pop(0)
        context = Context(
            fact_ids=tuple(i for kind, i, _ in parts if kind == "fact"),
            turn_ids=tuple(i for kind, i, _ in parts if kind == "turn"),
        )
        before = [token for _, _, part in parts for token in part]
        key = segment_key(
            ids,
            [(f"{memory.user}/{kind}/{i}", part) for kind, i, part in parts],
            fingerprint,
        )
        # Two users with the same fact have segments of their own: the key names the user.
        key = segment_key(ids, [(memory.user, ()), (key, ())], fingerprint)
        if old is not None and old.key == key and old.token_ids == ids:
            continue
        plans.append(EncodePlan(fact, key, ids, context, (*preamble, *before, *ids)))
    return plans, too_long
