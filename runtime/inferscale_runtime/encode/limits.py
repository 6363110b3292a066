"""Quota and retention of an encoding job (pure, but for the size that is asked for)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from inferscale_runtime.config import QuotaConfig
from inferscale_runtime.encode.input import UserInput
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.store.living import API
from inferscale_runtime.store.records import Fact, UserMemory

RECOUNT_BYTES = 1 << 30
"""Own bytes after which the store is measured again: other shards write too (arbitrary)."""


def refuse_many_facts(users: Mapping[str, UserInput], quota: QuotaConfig) -> None:
    """Looks at all users before anything is written.

    Raises:
        ConfigError: Naming the first user with too many facts.
    """
    limit = quota.max_facts_per_user
    if limit is None:
        return
    for given in users.values():
        if len(given.facts) > limit:
            raise ConfigError(
                f"user '{given.user}' has {len(given.facts)} facts, quota.max_facts_per_user is "
                f"{limit}; remove facts of this user or raise the limit. Nothing was written"
            )


class StoreBudget:
    """Keeps a store below its byte limit.

    Args:
        limit: ``quota.max_store_bytes``.
        measure: Bytes of the store now.
    """

    def __init__(self, limit: int | None, measure: Callable[[], int]) -> None:
        self._limit = limit
        self._measure = measure
        self._known: int | None = None
        self._since = 0

    def spend(self, user: str, num_bytes: int) -> None:
        """Called before each write.

        Args:
            user: Whose data are written.
            num_bytes: How many bytes will be added at the least.

        Raises:
            ConfigError: When the store would pass its limit.
        """
        if self._limit is None:
            return
        if self._known is None or self._since + num_bytes > RECOUNT_BYTES:
            self._known, self._since = self._measure(), 0
        if self._known + num_bytes > self._limit:
            # What was freed meanwhile counts too, before anybody is refused.
            self._known, self._since = self._measure(), 0
        if self._known + num_bytes > self._limit:
            raise ConfigError(
                f"user '{user}': the store has {self._known} bytes and {num_bytes} more are to be "
                f"written, quota.max_store_bytes is {self._limit}; remove users or facts, or raise "
                "the limit. What is stored stays usable"
            )
        self._known += num_bytes
        self._since += num_bytes


@dataclass(frozen=True, slots=True)
class Retained:
    """What retention left of an input.

    Attributes:
        users: The input without what is too old.
        expired: Facts that were dropped.
        undated: Facts that were kept because their ``time`` is no ISO 8601 date.
    """

    users: dict[str, UserInput]
    expired: int = 0
    undated: int = 0


def parse_time(text: str | None) -> datetime | None:
    """Reads an ISO 8601 date or date with time; UTC where it names no zone. None for all else."""
    try:
        found = datetime.fromisoformat((text or "").strip())
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _learnt(fact: Fact, turn_times: Mapping[str, datetime | None]) -> datetime | None:
    """A fact's own time, or else that of its source turn."""
    return parse_time(fact.time) or turn_times.get(fact.turn_id or "")


def drop_expired(
    users: Mapping[str, UserInput], max_age_days: int | None, now: datetime
) -> Retained:
    """Takes facts and turns out that are older than the limit.

    A fact's time is its own, or else that of its source turn. A turn that goes takes only itself
    along: a younger fact that names it loses the name.

    Args:
        users: The input.
        max_age_days: ``retention.max_age_days``; None keeps all.
        now: With time zone.
    """
    if max_age_days is None:
        return Retained(dict(users))
    oldest = now - timedelta(days=max_age_days)
    kept: dict[str, UserInput] = {}
    expired = undated = 0
    for user, given in users.items():
        times = {turn.id: parse_time(turn.time) for turn in given.turns}
        turns = tuple(t for t in given.turns if (times[t.id] or now) >= oldest)
        ids = {turn.id for turn in turns}
        facts = []
        for fact in given.facts:
            when = _learnt(fact, times)
            if when is not None and when < oldest:
                expired += 1
                continue
            undated += when is None
            facts.append(fact if fact.turn_id in ids else replace(fact, turn_id=None))
        kept[user] = replace(given, facts=tuple(facts), turns=turns)
    return Retained(kept, expired, undated)


def expired_facts(memory: UserMemory, max_age_days: int, now: datetime) -> list[str]:
    """Ids of the facts of the memory API that are older than the limit.

    A fact's time is its own, that of its turn, or else that of its last change. Facts of other
    origins come with an input, from which ``drop_expired`` takes them.

    Args:
        memory: The user as stored.
        max_age_days: ``retention.max_age_days``.
        now: With time zone.
    """
    oldest = now - timedelta(days=max_age_days)
    times = {turn.id: parse_time(turn.time) for turn in memory.turns}
    return [
        fact.id
        for fact in memory.facts
        if fact.origin == API
        and (_learnt(fact, times) or parse_time(fact.updated_at) or now) < oldest
    ]
