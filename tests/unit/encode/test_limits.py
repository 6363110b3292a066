"""Quota and retention."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from inferscale_runtime.config import QuotaConfig
from inferscale_runtime.encode.committer import FactsCommitter
from inferscale_runtime.encode.input import UserInput
from inferscale_runtime.encode.limits import (
    RECOUNT_BYTES,
    StoreBudget,
    drop_expired,
    expired_facts,
    parse_time,
    refuse_many_facts,
)
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.store.living import API, FactWrite, put_facts
from inferscale_runtime.store.records import Fact, Turn
from inferscale_runtime.store.store import Store

NOW = datetime(2026, 3, 31, 12, tzinfo=UTC)


def user(name: str, facts: list[Fact], turns: list[Turn] | None = None) -> dict[str, UserInput]:
    return {name: UserInput(name, tuple(facts), tuple(turns or []))}


def test_too_many_facts_name_the_user_and_the_numbers() -> None:
    facts = [Fact(str(n), "secret words", None, None) for n in range(3)]
    users = user("ann", facts)
    refuse_many_facts(users, QuotaConfig())
    refuse_many_facts(users, QuotaConfig(max_facts_per_user=3))
    with pytest.raises(ConfigError) as caught:
        refuse_many_facts(users, QuotaConfig(max_facts_per_user=2))
    message = str(caught.value)
    assert "'ann' has 3 facts" in message
    assert "quota.max_facts_per_user is 2" in message
    assert "secret" not in message


def test_no_limit_measures_nothing() -> None:
    def measure() -> int:
        raise AssertionError("measured")

    StoreBudget(None, measure).spend("ann", 1 << 40)


def test_store_limit_counts_own_writes() -> None:
    budget = StoreBudget(1000, lambda: 400)
    budget.spend("ann", 600)
    # Measured anew before it refuses: the store has 400 bytes, whatever was written.
    with pytest.raises(ConfigError, match=r"'ann'.*400 bytes and 601 more.*is 1000"):
        budget.spend("ann", 601)


def test_store_limit_sees_other_writers() -> None:
    sizes = [0, RECOUNT_BYTES]
    budget = StoreBudget(RECOUNT_BYTES + 10, lambda: sizes.pop(0) if len(sizes) > 1 else sizes[0])
    budget.spend("ann", 5)
    with pytest.raises(ConfigError, match=r"quota\.max_store_bytes"):
        budget.spend("ann", RECOUNT_BYTES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-03-01", datetime(2026, 3, 1, tzinfo=UTC)),
        (" 2026-03-01T10:00:00Z ", datetime(2026, 3, 1, 10, tzinfo=UTC)),
        ("2026-03-01T12:00:00+02:00", datetime(2026, 3, 1, 10, tzinfo=UTC)),
        ("3 May 2025", None),
        ("", None),
        (None, None),
    ],
)
def test_times(text: str | None, expected: datetime | None) -> None:
    assert parse_time(text) == expected


def test_old_facts_and_turns_go_and_undated_ones_stay() -> None:
    turns = [Turn("t1", "A", "x", "2026-03-01"), Turn("t2", "A", "y", "2026-03-30")]
    facts = [
        Fact("own-old", "a", None, "2026-03-20"),
        Fact("own-new", "b", None, "2026-03-25"),
        Fact("turn-old", "c", "t1", None),
        Fact("turn-new", "d", "t2", "in spring"),
        Fact("undated", "e", None, "long ago"),
        Fact("new-of-old-turn", "f", "t1", "2026-03-30"),
    ]
    kept = drop_expired(user("ann", facts, turns), 7, NOW)
    assert (kept.expired, kept.undated) == (2, 1)
    given = kept.users["ann"]
    assert [fact.id for fact in given.facts] == [
        "own-new", "turn-new", "undated", "new-of-old-turn",
    ]  # fmt: skip
    assert [turn.id for turn in given.turns] == ["t2"]
    assert [fact.turn_id for fact in given.facts] == [None, "t2", None, None]


def test_no_limit_keeps_all() -> None:
    users = user("ann", [Fact("1", "a", None, "1970-01-01")])
    assert drop_expired(users, None, NOW).users == users
    assert drop_expired(users, None, NOW).expired == 0


def test_a_user_whose_facts_are_all_old_stays_named() -> None:
    """So that the job deletes them: a user that is not named is left alone."""
    kept = drop_expired(user("ann", [Fact("1", "a", None, "1970-01-01")]), 1, NOW)
    assert kept.users == {"ann": UserInput("ann", (), ())}


def test_old_facts_of_the_memory_api_are_deleted_from_the_store(tmp_path: Path) -> None:
    """NOW is long ago, so what is written here is new to it; facts with a time are not."""
    store = Store.open(str(tmp_path / "s"), create=True)
    writes = [
        FactWrite("old", "a", time="2026-03-20"),
        FactWrite("new", "b", time="2026-03-25"),
        FactWrite("undated", "c"),
    ]
    for origin, named in ((API, writes), ("mem0", [FactWrite("theirs", "d", time="2001-01-01")])):
        put_facts(
            store,
            "ann",
            named,
            origin=origin,
            embedder="toy",
            embed=lambda texts: np.ones((len(texts), 1), np.float32),
            limits=QuotaConfig(),
        )
    memory = store.read_user("ann")
    assert memory is not None
    assert expired_facts(memory, 7, NOW) == ["old"]
    assert expired_facts(memory, 7, datetime.now(UTC) + timedelta(days=8)) == [
        "old", "new", "undated",
    ]  # fmt: skip

    committer = FactsCommitter(store, StoreBudget(None, lambda: 0), "toy", None)
    age = (datetime.now(UTC) - datetime(2026, 3, 22, tzinfo=UTC)).days
    assert committer.forget_expired("ann", age) == 1
    assert committer.forget_expired("ann", age) == 0
    assert committer.forget_expired("nobody", age) == 0
    left = store.read_user("ann")
    assert left is not None
    assert [fact.id for fact in left.facts] == ["new", "undated", "theirs"]
    assert left.tombstones == frozenset()
