"""The work that is measured: users, facts, questions and arrival times (pure, seeded)."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_NAMES = "Nora Ines Jakob Amara Pavel Lucia Tomas Yuki Farid Greta Oscar Leila Mateo Hanna".split()
_PLACES = "Bergen Lisbon Krakow Valencia Ghent Tallinn Porto Trieste Galway Malmo Basel".split()
_THINGS = (
    "a blue sailing boat",
    "an old piano",
    "a pair of hiking boots",
    "a small greenhouse",
    "a racing bicycle",
    "a wooden telescope",
    "a collection of maps",
    "a rescued greyhound",
    "a box of vinyl records",
    "a second-hand camera",
)
_REASONS = (
    "the neighbours were moving abroad",
    "a friend from the choir had asked for help",
    "the doctor had recommended more fresh air",
    "there was a large discount in the spring sale",
    "the old one had been lost on a train",
    "the children wanted to learn something new",
    "a colleague at the hospital had praised it",
    "the garden behind the house was finally ready",
)
_MONTHS = "January March April June July September October December".split()


@dataclass(frozen=True, slots=True)
class Workload:
    """Users with their facts and questions.

    Attributes:
        lines: Input lines of ``inferscale encode``.
        users: User ids.
        questions: User id -> questions, each to be asked once per measurement.
    """

    lines: list[dict[str, str]]
    users: list[str]
    questions: dict[str, list[str]]


def synthetic_workload(seed: int, users: int, facts: int, questions: int) -> Workload:
    """Makes facts of about 30 tokens that are different for every user.

    Args:
        seed: Same seed, same work.
        users: How many users.
        facts: Facts of each.
        questions: Questions of each.

    Returns:
        The work.
    """
    lines: list[dict[str, str]] = []
    names = [f"user-{number:04d}" for number in range(users)]
    asked: dict[str, list[str]] = {}
    for user in names:
        rng = random.Random(f"{seed}/{user}")
        texts: dict[str, None] = {}
        while len(texts) < facts:
            texts[_fact(rng)] = None
        lines += [
            {"kind": "fact", "user": user, "id": f"f{number}", "text": text}
            for number, text in enumerate(texts)
        ]
        asked[user] = [_question(rng, number) for number in range(questions)]
    return Workload(lines, names, asked)


def _fact(rng: random.Random) -> str:
    return (
        f"In {rng.choice(_MONTHS)} {rng.randrange(1990, 2026)} {rng.choice(_NAMES)} from "
        f"{rng.choice(_PLACES)} bought {rng.choice(_THINGS)} for {rng.randrange(20, 980)} euros, "
        f"because {rng.choice(_REASONS)}."
    )


def _question(rng: random.Random, number: int) -> str:
    thing = rng.choice(_THINGS)
    return f"Question {number + 1}: who from {rng.choice(_PLACES)} bought {thing}, and why?"


class ZipfUsers:
    """Draws users by Zipf's law: the r-th user in proportion to ``1 / r ** exponent``.

    Args:
        users: Most frequent first.
        exponent: 0 draws all equally often.
        seed: Same seed, same draws.
    """

    def __init__(self, users: Sequence[str], exponent: float, seed: int) -> None:
        self._users = list(users)
        self._sums = list(
            itertools.accumulate(1 / rank**exponent for rank in range(1, len(users) + 1))
        )
        self._rng = random.Random(seed)

    def draw(self, busy: Collection[str] = ()) -> str:
        """The next user.

        Args:
            busy: Users that must not be drawn; fewer than there are.
        """
        if len(set(busy)) >= len(self._users):
            raise ValueError("every user is busy")
        while True:
            point = self._rng.random() * self._sums[-1]
            user = self._users[bisect.bisect_right(self._sums, point)]
            if user not in busy:
                return user


def poisson_arrivals(rate: float, count: int, seed: int) -> Iterator[float]:
    """Arrival times of an open loop.

    Args:
        rate: Mean arrivals in a second.
        count: How many.
        seed: Same seed, same times.

    Yields:
        Seconds from the start, ascending.
    """
    rng = random.Random(seed)
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        yield now
