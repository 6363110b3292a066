"""Users, facts, questions and arrival times."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from inferscale_runtime.bench.run import locomo_questions
from inferscale_runtime.bench.workload import ZipfUsers, poisson_arrivals, synthetic_workload
from inferscale_runtime.encode.input import parse_lines


def test_synthetic_work_is_valid_input_with_distinct_facts() -> None:
    import json

    work = synthetic_workload(seed=1, users=3, facts=50, questions=4)
    users = parse_lines([json.dumps(line).encode() for line in work.lines], "work")
    assert list(users) == work.users
    texts = {user: [fact.text for fact in data.facts] for user, data in users.items()}
    assert all(len(set(facts)) == 50 for facts in texts.values())
    assert not set(texts[work.users[0]]) & set(texts[work.users[1]])
    assert all(len(set(asked)) == 4 for asked in work.questions.values())
    words = [len(text.split()) for facts in texts.values() for text in facts]
    assert 17 <= min(words)
    assert max(words) <= 28


def test_synthetic_work_depends_on_the_seed_alone() -> None:
    assert synthetic_workload(1, 2, 5, 2) == synthetic_workload(1, 2, 5, 2)
    assert synthetic_workload(1, 2, 5, 2).lines != synthetic_workload(2, 2, 5, 2).lines
    # More users change nothing for those that were there.
    assert synthetic_workload(1, 3, 5, 2).lines[:10] == synthetic_workload(1, 2, 5, 2).lines


def test_zipf_frequencies() -> None:
    users = ZipfUsers(["a", "b", "c", "d"], exponent=1.0, seed=3)
    counts = Counter(users.draw() for _ in range(20_000))
    whole = 1 + 1 / 2 + 1 / 3 + 1 / 4
    for rank, user in enumerate("abcd", start=1):
        assert counts[user] / 20_000 == pytest.approx(1 / rank / whole, abs=0.015)


def test_zipf_with_exponent_0_is_even_and_seeded() -> None:
    draws = [ZipfUsers("abcd", 0.0, seed=5).draw() for _ in range(3)]
    assert len(set(draws)) == 1
    users = ZipfUsers("abcd", 0.0, seed=5)
    counts = Counter(users.draw() for _ in range(8000))
    assert all(counts[user] == pytest.approx(2000, abs=200) for user in "abcd")


def test_zipf_never_draws_a_busy_user() -> None:
    users = ZipfUsers("abc", exponent=3.0, seed=1)
    assert {users.draw({"a", "b"}) for _ in range(50)} == {"c"}
    with pytest.raises(ValueError, match="busy"):
        users.draw({"a", "b", "c"})


def test_poisson_arrivals() -> None:
    times = list(poisson_arrivals(rate=4.0, count=8000, seed=2))
    assert times == list(poisson_arrivals(4.0, 8000, 2))
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert all(gap > 0 for gap in gaps)
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    # Exponential gaps: their deviation equals their mean.
    assert (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)


def test_locomo_questions() -> None:
    document = [{"sample_id": "c1", "qa": [{"question": "Who?"}, {"question": "When?"}]}]
    assert locomo_questions(document) == {"c1": ["Who?", "When?"]}
