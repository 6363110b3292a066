"""From values of single questions to the table: means, intervals and shares (pure, seeded)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from inferscale_runtime.bench.quality.questions import CATEGORIES
from inferscale_runtime.bench.report import Row

LEVEL = 0.9
RESAMPLES = 2000
LEAST_GAIN = 0.2
"""Nats that text must gain over no memory before a share of it means anything."""

_Vector = npt.NDArray[np.float64]
Value = dict[str, Any]


def interval(
    statistic: Callable[[npt.NDArray[np.intp]], float], count: int, seed: int
) -> tuple[float, float]:
    """Percentile bootstrap over questions.

    Args:
        statistic: Of the questions with these numbers.
        count: How many questions there are.
        seed: Same seed, same interval.

    Returns:
        Lower and upper end of the 90 % interval.
    """
    rng = np.random.default_rng(seed)
    drawn = [statistic(rng.integers(0, count, count)) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def summarise(values: Sequence[Value], seed: int) -> Row:
    """One row: each question weighs the same, however long its answer is."""

    def column(name: str) -> _Vector:
        return np.array([value[name] for value in values], np.float64)

    text, injected, none = column("text_nats"), column("injected_nats"), column("none_nats")
    less = text - injected
    row: Row = {"questions": len(values)}
    for name, numbers in (
        ("worse_nats", less),
        ("kl", column("kl")),
        ("top1", column("top1")),
    ):
        row[name] = _rounded(numbers.mean())
        low, high = interval(partial(_mean, numbers), len(values), seed)
        row[f"{name}_low"], row[f"{name}_high"] = _rounded(low), _rounded(high)
    row["text_nats"], row["injected_nats"] = _rounded(text.mean()), _rounded(injected.mean())
    row["none_nats"] = _rounded(none.mean())
    gain = float((text - none).mean())
    row["text_gain_nats"] = _rounded(gain)
    row["recovered"] = None
    if gain >= LEAST_GAIN:

        def recovered(drawn: npt.NDArray[np.intp]) -> float:
            base = none[drawn].mean()
            return float((injected[drawn].mean() - base) / (text[drawn].mean() - base))

        row["recovered"] = _rounded(recovered(np.arange(len(values))))
        low, high = interval(recovered, len(values), seed)
        row["recovered_low"], row["recovered_high"] = _rounded(low), _rounded(high)
    recalls = [value["recall"] for value in values if value["recall"] is not None]
    row["recall"] = _rounded(float(np.mean(recalls))) if recalls else None
    for name in ("text_f1", "injected_f1", "text_judged", "injected_judged"):
        if all(name in value for value in values):
            row[name] = _rounded(float(column(name).mean()))
    return row


def summarise_categories(values: Sequence[Value], seed: int) -> list[Row]:
    """The row of all questions, then one for each category that has any."""
    rows: list[Row] = [{"category": "all", **summarise(values, seed)}]
    for number, name in CATEGORIES.items():
        chosen = [value for value in values if value["category"] == number]
        if chosen:
            rows.append({"category": name, **summarise(chosen, seed)})
    return rows


def _mean(numbers: _Vector, drawn: npt.NDArray[np.intp]) -> float:
    return float(numbers[drawn].mean())


def _rounded(value: float) -> float:
    return round(float(value), 4)
