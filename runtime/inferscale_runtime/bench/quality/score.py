"""Two distributions over the same answer: how much they differ (torch, no engine)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Comparison:
    """Text against injected at the positions of one gold answer.

    Attributes:
        text_nats: Mean log-likelihood of the answer's tokens after the text prompt.
        injected_nats: The same with injected memory.
        kl: Mean KL(text || injected) in nats.
        top1: Share of positions at which both expect the same token most.
    """

    text_nats: float
    injected_nats: float
    kl: float
    top1: float


def mean_nats(logprobs: torch.Tensor, gold: torch.Tensor) -> float:
    """Mean log-likelihood of an answer.

    Args:
        logprobs: ``[tokens, vocabulary]``.
        gold: ``[tokens]`` int64.
    """
    return float(logprobs.gather(1, gold[:, None]).mean())


def compare(text: torch.Tensor, injected: torch.Tensor, gold: torch.Tensor) -> Comparison:
    """Compares distributions.

    Args:
        text: ``[tokens, vocabulary]`` log-probabilities.
        injected: The same shape.
        gold: ``[tokens]`` int64.
    """
    divergence = (text.exp() * (text - injected)).sum(-1)
    same = text.argmax(-1) == injected.argmax(-1)
    return Comparison(
        mean_nats(text, gold),
        mean_nats(injected, gold),
        float(divergence.mean()),
        float(same.float().mean()),
    )
