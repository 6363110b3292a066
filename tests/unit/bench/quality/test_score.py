from __future__ import annotations

import math

import pytest
import torch

from inferscale_runtime.bench.quality.score import compare, mean_nats


def log(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def test_equal_distributions() -> None:
    both = log([0.5, 0.25, 0.25], [0.1, 0.2, 0.7])
    found = compare(both, both, torch.tensor([1, 2]))
    assert (found.kl, found.top1) == (0, 1)
    assert found.text_nats == found.injected_nats == pytest.approx(math.log(0.25 * 0.7) / 2)


def test_different_distributions() -> None:
    text, injected = log([0.5, 0.5], [0.9, 0.1]), log([0.25, 0.75], [0.9, 0.1])
    found = compare(text, injected, torch.tensor([0, 0]))
    # By hand: 0.5 ln 2 + 0.5 ln(2/3) at the first position, 0 at the second.
    assert found.kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)
    assert found.text_nats - found.injected_nats == pytest.approx(math.log(2) / 2)
    assert found.top1 == 0.5  # a tie goes to the lower id


def test_mean_nats_is_of_the_gold_tokens() -> None:
    assert mean_nats(log([0.5, 0.5], [0.2, 0.8]), torch.tensor([0, 1])) == pytest.approx(
        math.log(0.5 * 0.8) / 2
    )
