"""Which facts of a request are injected and which go as text (pure).

The token ids of a request are the same, in the same order, whatever is injected: mode and residency
decide only how many of them are claimed as already computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Order = Literal["relevance", "stored"]


@dataclass(frozen=True, slots=True)
class PlannedFact:
    """One retrieved fact.

    Attributes:
        index: Position in the user's facts.
        token_ids: Its prompt tokens.
        key: Key of its resident segment, or None when it must go as text.
    """

    index: int
    token_ids: tuple[int, ...]
    key: str | None


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompt of one request.

    Attributes:
        token_ids: All prompt tokens.
        num_claimed: How many of them are injected, 0 for a text request.
        keys: Segment keys after the preamble, in prompt order; empty for a text request.
        num_facts: Facts in the prompt.
        num_text_tokens: Tokens of facts that are prefilled.
        order: Indexes of the facts in prompt order.
        num_injectable: How many of them stand where they can be claimed.
    """

    token_ids: list[int]
    num_claimed: int
    keys: tuple[str, ...]
    num_facts: int
    num_text_tokens: int
    order: tuple[int, ...]
    num_injectable: int


def order_facts(best_first: Sequence[int], order: Order) -> list[int]:
    """Prompt order of retrieved facts: best last, or the order of learning."""
    return sorted(best_first) if order == "stored" else list(reversed(best_first))


def plan_prompt(
    preamble: Sequence[int],
    facts: Sequence[PlannedFact],
    tail: Sequence[int],
    *,
    link_tail: int,
    inject: bool,
    fixed: int | None = None,
) -> PromptPlan:
    """Lays a prompt out and decides the claim.

    Args:
        preamble: Tokens before the first fact.
        facts: In prompt order.
        tail: Tokens after the facts.
        link_tail: How many facts at the end are left unclaimed on purpose.
        inject: False for a text request. Facts without KV still go behind the others, as they do
            when injecting, so that both have the same tokens.
        fixed: For facts whose order was decided by an earlier prompt: none of them moves, and at
            most this many are claimed, up to the first without KV. ``link_tail`` is not used then.

    Returns:
        The plan.
    """
    if fixed is None:
        keep = max(0, len(facts) - link_tail)
        resident = [fact for fact in facts[:keep] if fact.key is not None]
        text = [fact for fact in facts[:keep] if fact.key is None] + list(facts[keep:])
    else:
        keep = next((n for n in range(fixed) if facts[n].key is None), fixed)
        resident, text = list(facts[:keep]), list(facts[keep:])
    injected_ids = [token for fact in resident for token in fact.token_ids]
    text_ids = [token for fact in text for token in fact.token_ids]
    token_ids = [*preamble, *injected_ids, *text_ids, *tail]
    return PromptPlan(
        token_ids=token_ids,
        num_claimed=len(preamble) + len(injected_ids) if inject else 0,
        keys=tuple(fact.key for fact in resident if fact.key is not None) if inject else (),
        num_facts=len(facts),
        num_text_tokens=len(text_ids) if inject else len(injected_ids) + len(text_ids),
        order=tuple(fact.index for fact in (*resident, *text)),
        num_injectable=len(resident),
    )
