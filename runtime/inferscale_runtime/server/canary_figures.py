"""What the canary measures, and when a store is no longer trusted (pure).

The distance between two next-token distributions is known by the most likely tokens of each only.
All tokens that are not in both lists are taken as one: by the log-sum inequality the divergence
that comes out never exceeds the true one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from inferscale_runtime.config import CanaryConfig

State = Literal["unknown", "ok", "degraded"]
RETRY_SECONDS = 60.0
"""How long until another try after one that gave no sample (arbitrary)."""
_LEAST = 1e-9

Logprobs = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, scored both ways.

    Attributes:
        kl: Sum over positions of KL(text || injected) in nats.
        matches: Positions at which both expect the same token most.
        positions: How many were compared.
    """

    kl: float
    matches: int
    positions: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the positions of the window.

    Attributes:
        kl: KL(text || injected) in nats, at least.
        top1: Share of positions with the same best token.
        samples: Prompts.
    """

    kl: float
    top1: float
    samples: int


def truncated_kl(text: Logprobs, injected: Logprobs) -> float:
    """KL(text || injected) in nats with all tokens that are not in both lists taken as one.

    Args:
        text: Log-probabilities of the most likely tokens after the text prompt.
        injected: The same after the injected prompt.

    Returns:
        At most the true divergence, and at least 0.
    """
    common = text.keys() & injected.keys()
    total, text_rest, injected_rest = 0.0, 1.0, 1.0
    for token in common:
        p = math.exp(text[token])
        total += p * (text[token] - injected[token])
        text_rest -= p
        injected_rest -= math.exp(injected[token])
    # Rounding may leave less than nothing.
    p, q = max(text_rest, _LEAST), max(injected_rest, _LEAST)
    return max(0.0, total + p * math.log(p / q))


def compare_positions(text: Sequence[Logprobs], injected: Sequence[Logprobs]) -> Sample:
    """Compares the same positions of both."""
    pairs = list(zip(text, injected, strict=True))
    return Sample(
        sum(truncated_kl(a, b) for a, b in pairs),
        sum(best_token(a) == best_token(b) for a, b in pairs),
        len(pairs),
    )


def best_token(logprobs: Logprobs) -> int:
    """The most likely token; of equals the one with the lower id."""
    return min(logprobs, key=lambda token: (-logprobs[token], token))


class StoreWatch:
    """Samples of one store and what follows from them.

    Args:
        config: Limits.
    """

    def __init__(self, config: CanaryConfig) -> None:
        self._config = config
        self._samples: deque[Sample] = deque(maxlen=config.window)
        self._next_check = 0.0
        self.state: State = "unknown"

    @property
    def figures(self) -> Figures | None:
        """Of the window; None without a sample."""
        positions = sum(sample.positions for sample in self._samples)
        if not positions:
            return None
        return Figures(
            sum(sample.kl for sample in self._samples) / positions,
            sum(sample.matches for sample in self._samples) / positions,
            len(self._samples),
        )

    @property
    def least_samples(self) -> int:
        """Samples before there is a verdict: one answer says little."""
        return min(self._config.window, self._config.start_samples or 3)

    def due(self, now: float) -> bool:
        """Whether the store has to be checked without waiting for a user's request."""
        return self.state != "ok" and now >= self._next_check

    def postpone(self, now: float) -> None:
        """There was nothing to score."""
        self._next_check = now + RETRY_SECONDS

    def restart(self) -> None:
        """Forgets the samples: a store that was mended must not wait for a window to pass."""
        self._samples.clear()

    def add(self, sample: Sample, now: float) -> bool:
        """One more sample.

        Returns:
            Whether the state has changed.
        """
        self._samples.append(sample)
        figures = self.figures
        if figures is None or figures.samples < self.least_samples:
            return False
        above = figures.kl > self._config.kl_limit or figures.top1 < self._config.top1_limit
        state: State = "degraded" if above else "ok"
        self._next_check = now + self._config.recheck_seconds
        changed, self.state = state != self.state, state
        return changed
