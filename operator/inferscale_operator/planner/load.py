"""What servers say of their load, by meaning and not by vLLM's names (pure).

vLLM has renamed metrics before (``gpu_cache_usage_perc`` became ``kv_cache_usage_perc``), and
autoscalers that named them fell silent. So each signal has a list of names, the newest first, and
what a server was seen to have is what counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from inferscale_operator.desired.autoscaling import KV_CACHE, RUNNING, TTFT, WAITING

ALIASES: Mapping[str, tuple[str, ...]] = {
    RUNNING: ("vllm:num_requests_running",),
    WAITING: ("vllm:num_requests_waiting",),
    KV_CACHE: ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    TTFT: ("vllm:time_to_first_token_seconds",),
}
"""vLLM's names of each signal, the newest first; ``ttft`` is a histogram."""

STALE_SECONDS = 30.0
"""Older figures change nothing."""

LEAST_POINTS = 3
LEAST_SPAN_SECONDS = 10.0
"""A shorter history is no trend."""

Buckets = tuple[tuple[float, float], ...]
"""(upper bound in seconds, how many were below it), ascending; the last bound is infinite."""


@dataclass(frozen=True, slots=True)
class PodLoad:
    """Load of one pod.

    Attributes:
        age_seconds: Age of the figures.
        running: Requests that are computed.
        waiting: Requests that wait inside the server.
        kv_cache: Used part of the KV cache, 0 to 1.
        first_tokens: Times to first token of the last minutes.
        answered: First tokens since the look before; None without one.
        names: vLLM's metric name of each signal that is there.
    """

    age_seconds: float
    running: float = 0.0
    waiting: float = 0.0
    kv_cache: float = 0.0
    first_tokens: Buckets = ()
    answered: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of all ready pods together.

    Attributes:
        ready: How many pods are ready.
        age_seconds: Age of the oldest figures; infinite where a pod never told any.
        requests: Running and waiting.
        kv_cache: Sum of the used parts.
        ttft_p95_seconds: None when nobody asked lately.
        held: Requests that wait for a server at the activator.
        growth: Requests per second by which the load grows; 0 when it does not, or is not known.
        answered: First tokens since the look before; None when it is not known.
    """

    ready: int
    age_seconds: float = 0.0
    requests: float = 0.0
    kv_cache: float = 0.0
    ttft_p95_seconds: float | None = None
    held: int = 0
    growth: float = 0.0
    answered: float | None = 0.0

    @property
    def fresh(self) -> bool:
        """Whether a decision may rest on it."""
        return self.age_seconds <= STALE_SECONDS


def total_load(
    pods: Sequence[str],
    loads: Mapping[str, PodLoad],
    held: int,
    history: Iterable[tuple[float, float]] = (),
) -> Load:
    """Sums up.

    Args:
        pods: Names of all ready pods.
        loads: What they told.
        held: Requests at the activator.
        history: (seconds ago, requests) of earlier looks.
    """
    told = [loads[name] for name in pods if name in loads]
    ages = [load.age_seconds for load in told]
    answered = [load.answered for load in told]
    return Load(
        ready=len(pods),
        age_seconds=max(ages, default=0.0) if len(told) == len(pods) else math.inf,
        requests=sum(load.running + load.waiting for load in told),
        kv_cache=sum(load.kv_cache for load in told),
        ttft_p95_seconds=quantile(0.95, add_buckets(load.first_tokens for load in told)),
        held=held,
        growth=growth(history),
        answered=None if None in answered else sum(value or 0.0 for value in answered),
    )


def growth(history: Iterable[tuple[float, float]]) -> float:
    """Slope of a line through the points (least squares), per second; never below 0."""
    points = [(-ago, value) for ago, value in history]
    if len(points) < LEAST_POINTS:
        return 0.0
    times = [time for time, _ in points]
    if max(times) - min(times) < LEAST_SPAN_SECONDS:
        return 0.0
    mean_time = sum(times) / len(points)
    mean_value = sum(value for _, value in points) / len(points)
    spread = sum((time - mean_time) ** 2 for time in times)
    slope = sum((time - mean_time) * (value - mean_value) for time, value in points) / spread
    return max(0.0, slope)


def add_buckets(several: Iterable[Buckets]) -> Buckets:
    """Sum of histograms with the same bounds."""
    total: dict[float, float] = {}
    for buckets in several:
        for bound, count in buckets:
            total[bound] = total.get(bound, 0.0) + count
    return tuple(sorted(total.items()))


def quantile(part: float, buckets: Buckets) -> float | None:
    """A quantile as Prometheus computes it: linear inside its bucket.

    Args:
        part: 0 to 1.
        buckets: With an infinite last bound.

    Returns:
        None for an empty histogram; the last finite bound for what lies above it.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = part * buckets[-1][1]
    lower_bound, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return lower_bound
            inside = count - below
            share = (rank - below) / inside if inside > 0 else 1.0
            return lower_bound + (bound - lower_bound) * share
        lower_bound, below = bound, count
    return lower_bound


def names_of(pods: Sequence[str], loads: Mapping[str, PodLoad]) -> dict[str, str] | None:
    """Metric names that every pod has which told its load; None when none did."""
    told = [loads[name].names for name in pods if name in loads]
    if not told:
        return None
    return {
        signal: name
        for signal, name in told[0].items()
        if all(signal in other for other in told[1:])
    }
