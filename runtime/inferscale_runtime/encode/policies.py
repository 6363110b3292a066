"""Context policies: what is read before a fact while it is encoded, by name (pure, no torch).

A policy's name enters the fingerprint, so a name must mean the same selection forever; a change of
behaviour needs a new name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.retrieval.search import top_k
from inferscale_runtime.store.records import Fact, Turn


@dataclass(frozen=True, slots=True)
class Context:
    """What is read before one fact.

    Attributes:
        fact_ids: In reading order, nearest last.
        turn_ids: In reading order, nearest last.
    """

    fact_ids: tuple[str, ...] = ()
    turn_ids: tuple[str, ...] = ()


class ContextPolicy(Protocol):
    """Chooses the context of a fact."""

    @property
    def name(self) -> str:
        """The name that `parse_policy` accepts; part of the fingerprint."""

    @property
    def needs_embeddings(self) -> bool:
        """Whether `select` must be given embeddings."""

    def select(
        self,
        index: int,
        facts: Sequence[Fact],
        turns: Sequence[Turn],
        embeddings: npt.NDArray[np.float32] | None,
    ) -> Context:
        """Chooses the context of ``facts[index]``.

        Args:
            index: Which fact.
            facts: All facts of the user, in the order in which they were learnt.
            turns: All turns of the user, in conversation order.
            embeddings: ``[len(facts), dim]``, unit length; None unless `needs_embeddings`.

        Returns:
            The context; it never contains the fact itself.
        """


@dataclass(frozen=True, slots=True)
class _NonePolicy:
    name: str = "none"
    needs_embeddings: bool = False

    def select(
        self,
        index: int,
        facts: Sequence[Fact],
        turns: Sequence[Turn],
        embeddings: npt.NDArray[np.float32] | None,
    ) -> Context:
        return Context()


@dataclass(frozen=True, slots=True)
class _TurnsPolicy:
    window: int
    needs_embeddings: bool = False

    @property
    def name(self) -> str:
        return f"turns:{self.window}"

    def select(
        self,
        index: int,
        facts: Sequence[Fact],
        turns: Sequence[Turn],
        embeddings: npt.NDArray[np.float32] | None,
    ) -> Context:
        source = facts[index].turn_id
        at = next((i for i, turn in enumerate(turns) if turn.id == source), 0)
        return Context(turn_ids=tuple(t.id for t in turns[max(0, at - self.window) : at]))


@dataclass(frozen=True, slots=True)
class _FactsPolicy:
    count: int | None  # None: all earlier facts
    needs_embeddings: bool = False

    @property
    def name(self) -> str:
        return "all" if self.count is None else f"facts:{self.count}"

    def select(
        self,
        index: int,
        facts: Sequence[Fact],
        turns: Sequence[Turn],
        embeddings: npt.NDArray[np.float32] | None,
    ) -> Context:
        start = 0 if self.count is None else max(0, index - self.count)
        return Context(fact_ids=tuple(fact.id for fact in facts[start:index]))


def _required(
    embeddings: npt.NDArray[np.float32] | None, facts: Sequence[Fact], policy: str
) -> npt.NDArray[np.float32]:
    if embeddings is None or len(embeddings) != len(facts):
        raise ConfigError(
            f"context policy '{policy}' needs one embedding for each fact; name an embedder"
        )
    return embeddings


@dataclass(frozen=True, slots=True)
class _NeighboursPolicy:
    count: int
    needs_embeddings: bool = True

    @property
    def name(self) -> str:
        return f"neighbours:{self.count}"

    def select(
        self,
        index: int,
        facts: Sequence[Fact],
        turns: Sequence[Turn],
        embeddings: npt.NDArray[np.float32] | None,
    ) -> Context:
        embeddings = _required(embeddings, facts, self.name)
        # One more than needed, because the fact is usually (not always: duplicates) its own best.
        best = top_k(embeddings[index], embeddings, self.count + 1)
        nearest = [i for i in best if i != index][: self.count]
        return Context(fact_ids=tuple(facts[i].id for i in reversed(nearest)))


class _ChainPolicy:
    """Similar facts stand next to each other on one path, and are read along it in groups.

    The facts of a group share the start of their prompts, so the prefix cache reads most of it
    once: far cheaper than ``neighbours``, at contexts that are less similar.
    """

    needs_embeddings = True

    def __init__(self, count: int) -> None:
        self._count = count
        self._known: tuple[npt.NDArray[np.float32], list[int], list[int]] | None = None

    @property
    def name(self) -> str:
        return f"chain:{self._count}"

    def select(
        self,
        index: int,
        facts: Sequence[Fact],
        turns: Sequence[Turn],
        embeddings: npt.NDArray[np.float32] | None,
    ) -> Context:
        embeddings = _required(embeddings, facts, self.name)
        # The path is the same for all facts of a user, who come one after the other.
        if self._known is None or self._known[0] is not embeddings:
            path = similarity_path(embeddings)
            places = [0] * len(path)
            for place, fact in enumerate(path):
                places[fact] = place
            self._known = embeddings, path, places
        _, path, places = self._known
        place = places[index]
        start = max(0, place // self._count * self._count - self._count)
        return Context(fact_ids=tuple(facts[n].id for n in path[start:place]))


def similarity_path(embeddings: npt.NDArray[np.float32]) -> list[int]:
    """Orders rows so that each is followed by the most similar one that is left.

    Args:
        embeddings: ``[n, dim]``, unit length.

    Returns:
        Row numbers, beginning with 0; among equals the lower one comes first.
    """
    left = np.ones(len(embeddings), bool)
    path = [0] if len(embeddings) else []
    while len(path) < len(embeddings):
        left[path[-1]] = False
        scores = np.einsum("nd,d->n", embeddings, embeddings[path[-1]])
        path.append(int(np.argmax(np.where(left, scores, -np.inf))))
    return path


# Name -> how to make the policy from its number; a new policy is one class and one line here.
_WITH_COUNT: dict[str, Callable[[int], ContextPolicy]] = {
    "turns": _TurnsPolicy,
    "facts": _FactsPolicy,
    "neighbours": _NeighboursPolicy,
    "chain": _ChainPolicy,
}
_PLAIN: dict[str, Callable[[], ContextPolicy]] = {
    "none": _NonePolicy,
    "all": lambda: _FactsPolicy(None),
}


def policy_names() -> tuple[str, ...]:
    """The names that `parse_policy` accepts, with ``N`` for a whole number of at least 1."""
    return (*_PLAIN, *(f"{name}:N" for name in _WITH_COUNT))


def parse_policy(name: str) -> ContextPolicy:
    """Makes the policy of a name such as ``neighbours:10``.

    Args:
        name: One of `policy_names`.

    Returns:
        The policy.

    Raises:
        ConfigError: The name is unknown or its number is wrong.
    """
    if name in _PLAIN:
        return _PLAIN[name]()
    kind, _, number = name.partition(":")
    # One spelling a policy (no sign, no leading zero), since the name is part of the fingerprint.
    valid = number.isascii() and number.isdecimal() and len(number) <= 6 and number[0] != "0"
    if kind in _WITH_COUNT and valid:
        return _WITH_COUNT[kind](int(number))
    raise ConfigError(
        f"unknown context policy '{name}'; use one of {', '.join(policy_names())}, "
        "where N is a whole number from 1 to 999999"
    )
