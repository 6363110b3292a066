"""Statistics of measured times (pure)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: a value that was really measured.

    Args:
        values: At least one.
        percent: 0 to 100.

    Returns:
        The smallest value that at least ``percent`` per cent of the values do not exceed.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values")
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]


def summary(seconds: Sequence[float], name: str) -> dict[str, float]:
    """Median and tail of times.

    Args:
        seconds: At least one.
        name: Start of the keys.

    Returns:
        ``<name>_p50_ms``, ``<name>_p95_ms`` and ``<name>_p99_ms``.
    """
    return {
        f"{name}_p50_ms": round(statistics.median(seconds) * 1e3, 2),
        f"{name}_p95_ms": round(percentile(seconds, 95) * 1e3, 2),
        f"{name}_p99_ms": round(percentile(seconds, 99) * 1e3, 2),
    }


def ratio(numerator: float, denominator: float) -> float | None:
    """A rounded quotient, or None when there is nothing to divide by."""
    return round(numerator / denominator, 3) if denominator else None
