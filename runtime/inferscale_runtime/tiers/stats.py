"""Counters and heat of the stores (pure apart from its lock; any thread)."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

HALF_LIFE_SECONDS = 300.0
"""After this time without requests a store's heat has halved (arbitrary: placement is re-planned
every minute or so, and moving a store costs reading it again)."""


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """What happened to one store since the start.

    Attributes:
        hits: Segments that a request found in the arena.
        misses: Segments that a request did not find there.
        staged_segments: Segments read from disk into the arena.
        staged_bytes: Their bytes.
        staging_seconds: Time spent on it, summed over the readers.
        evictions: Segments that made room.
        heat: Segments asked for per second, found or not, decaying with the half-life. Misses
            count too: otherwise a store on disk could never become hot.
    """

    hits: int = 0
    misses: int = 0
    staged_segments: int = 0
    staged_bytes: int = 0
    staging_seconds: float = 0.0
    evictions: int = 0
    heat: float = 0.0


class _Counters:
    __slots__ = ("decayed_at", "evictions", "heat", "hits", "misses", "seconds", "segments", "size")

    def __init__(self, now: float) -> None:
        self.hits = self.misses = self.segments = self.size = self.evictions = 0
        self.seconds = self.heat = 0.0
        self.decayed_at = now


class TierStats:
    """Counts by store.

    Args:
        clock: Seconds, monotonic.
        half_life_seconds: Of the heat.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        half_life_seconds: float = HALF_LIFE_SECONDS,
    ) -> None:
        self._clock = clock
        self._rate = math.log(2) / half_life_seconds
        self._lock = threading.Lock()
        self._stores: dict[str, _Counters] = {}

    def looked_up(self, store: str, hits: int, misses: int) -> None:
        """A request asked for segments."""
        with self._lock:
            counters = self._counters(store)
            counters.hits += hits
            counters.misses += misses
            counters.heat += self._rate * (hits + misses)

    def staged(self, store: str, segments: int, num_bytes: int, seconds: float) -> None:
        """Segments were read into the arena."""
        with self._lock:
            counters = self._counters(store)
            counters.segments += segments
            counters.size += num_bytes
            counters.seconds += seconds

    def evicted(self, store: str, segments: int = 1) -> None:
        """Segments made room."""
        with self._lock:
            self._counters(store).evictions += segments

    def snapshot(self) -> dict[str, StoreFigures]:
        """Figures of every store that was ever asked for."""
        with self._lock:
            return {name: self._figures(name) for name in sorted(self._stores)}

    def _figures(self, name: str) -> StoreFigures:
        c = self._counters(name)
        return StoreFigures(
            c.hits, c.misses, c.segments, c.size, c.seconds, c.evictions, round(c.heat, 6)
        )

    def _counters(self, store: str) -> _Counters:
        now = self._clock()
        counters = self._stores.get(store)
        if counters is None:
            counters = self._stores[store] = _Counters(now)
        counters.heat *= math.exp(-self._rate * max(0.0, now - counters.decayed_at))
        counters.decayed_at = now
        return counters
