"""What has to be encoded for one user, and what may no longer be injected (pure).

A new fact does not make older segments stale. A deleted or changed fact or turn takes every segment
that had it in its context out of injection, under every fingerprint (design section 5,
dependencies).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from inferscale_runtime.encode.policies import Context, ContextPolicy, affected_by
from inferscale_runtime.fingerprint import segment_key
from inferscale_runtime.prompt.template import Template
from inferscale_runtime.store.records import Fact, Segment, Turn, UserMemory


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
) -> tuple[UserMemory, list[int]]:
    """Replaces a user's facts and turns and drops the segments that depended on what is gone.

    Args:
        user: User id.
        old: What the store holds, or None.
        facts: The user's whole memory now.
        turns: The user's whole conversation now.
        embedder: Name of the embedder; another one than before makes all embeddings new.

    Returns:
        The memory to commit, and which rows of its embeddings are still to be computed (zero now).
    """
    if old is None:
        empty = np.zeros((len(facts), 0), np.float32)
        return UserMemory(user, 0, facts, turns, embedder, empty), list(range(len(facts)))
    old_facts = {fact.id: fact for fact in old.facts}
    new_texts = {fact.id: fact.text for fact in facts}
    new_turns = {turn.id: (turn.speaker, turn.text) for turn in turns}
    gone_facts = frozenset(i for i, fact in old_facts.items() if new_texts.get(i) != fact.text)
    gone_turns = frozenset(
        turn.id for turn in old.turns if new_turns.get(turn.id) != (turn.speaker, turn.text)
    )
    encodings = {}
    for digest, segments in old.encodings.items():
        dropped = gone_facts | affected_by(gone_facts, gone_turns, segments)
        encodings[digest] = {i: s for i, s in segments.items() if i not in dropped}
    rows: dict[str, npt.NDArray[np.float32]] = {}
    if old.embedder == embedder and old.embeddings.shape[1]:
        rows = dict(zip(old_facts, old.embeddings, strict=True))
    todo = [n for n, fact in enumerate(facts) if fact.id in gone_facts or fact.id not in rows]
    missing = set(todo)
    width = old.embeddings.shape[1] if rows else 0
    embeddings = np.zeros((len(facts), width), np.float32)
    for n, fact in enumerate(facts):
        if n not in missing:
            embeddings[n] = rows[fact.id]
    merged = replace(
        old, facts=facts, turns=turns, embedder=embedder, embeddings=embeddings, encodings=encodings
    )
    return merged, todo


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
