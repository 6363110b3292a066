from __future__ import annotations

from typing import Any

import numpy as np

from inferscale_runtime.bench.quality.summary import interval, summarise, summarise_categories


def value(category: int = 1, **fields: Any) -> dict[str, Any]:
    base = {"text_nats": -1.0, "injected_nats": -1.1, "none_nats": -2.0, "kl": 0.1, "top1": 0.9}
    return {"category": category, "recall": 1.0, **base, **fields}


def test_means_and_share_of_the_gain() -> None:
    row = summarise([value(), value(injected_nats=-1.3, recall=0.5, kl=0.3)], seed=0)
    assert row["worse_nats"] == 0.2
    assert row["kl"] == 0.2
    assert row["recall"] == 0.75
    assert row["text_gain_nats"] == 1
    assert row["recovered"] == 0.8
    assert row["recovered_low"] <= row["recovered"] <= row["recovered_high"]
    assert row["worse_nats_low"] < row["worse_nats"] < row["worse_nats_high"]


def test_no_share_of_a_gain_that_is_hardly_there() -> None:
    row = summarise([value(none_nats=-1.19), value(none_nats=-1.19)], seed=0)
    assert row["recovered"] is None
    assert "recovered_low" not in row
    assert row["text_gain_nats"] == 0.19


def test_questions_without_evidence_do_not_count_for_recall() -> None:
    assert summarise([value(recall=None), value(recall=0.5)], seed=0)["recall"] == 0.5
    assert summarise([value(recall=None)], seed=0)["recall"] is None


def test_answers_count_only_when_all_were_made() -> None:
    with_answer = value(injected_f1=0.5)
    assert "injected_f1" not in summarise([with_answer, value()], seed=0)
    assert summarise([with_answer, with_answer], seed=0)["injected_f1"] == 0.5


def test_rows_by_category() -> None:
    rows = summarise_categories([value(1), value(4), value(4, kl=0.3)], seed=0)
    assert [(row["category"], row["questions"]) for row in rows] == [
        ("all", 3),
        ("multi-hop", 1),
        ("single-hop", 2),
    ]
    assert rows[2]["kl"] == 0.2


def test_interval_is_seeded_and_holds_90_percent() -> None:
    numbers = np.random.default_rng(5).normal(size=400)

    def mean(drawn: Any) -> float:
        return float(numbers[drawn].mean())

    low, high = interval(mean, 400, seed=3)
    assert (low, high) == interval(mean, 400, seed=3)
    assert (low, high) != interval(mean, 400, seed=4)
    # 1.645 standard errors on either side.
    error = numbers.std() / 20
    assert abs((high - low) / (2 * 1.645 * error) - 1) < 0.1
    assert low < numbers.mean() < high
