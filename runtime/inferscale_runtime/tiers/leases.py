"""Holds on segments: what a request is given, and what the engine's processes do with it.

A request that is being planned has a hold: what it needs and is resident, or becomes so while the
rest is read from disk, stays. A planned request has a lease, which the engine ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from inferscale_runtime.tiers.eviction import Resident
from inferscale_runtime.tiers.slab import LEASE_ACTIVE, LEASE_DONE, LEASE_NEW, NUM_LEASES


@dataclass(frozen=True, slots=True)
class Lease:
    """A request's hold on its segments.

    Attributes:
        slot: Index into the leases file.
        generation: Value that the slot had when the lease was given.
        runs: ``(first row, rows)`` of the segments, in prompt order; a segment may lie in several.
        keys: The segments.
    """

    slot: int
    generation: int
    runs: tuple[tuple[int, int], ...]
    keys: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Hold:
    """What a request keeps in place until it has its lease.

    Attributes:
        keys: The segments that it needs.
        entries: Those that are there, pinned.
    """

    keys: frozenset[str]
    entries: list[Resident] = field(default_factory=list)


def activate_lease(leases: npt.NDArray[np.int64], slot: int, generation: int) -> bool:
    """Engine side: marks a lease as in use.

    Returns:
        False when it was taken back meanwhile; the request must go as text.
    """
    if not 0 <= slot < NUM_LEASES or leases[slot, 0] != generation:
        return False
    if leases[slot, 1] not in (LEASE_NEW, LEASE_ACTIVE):
        return False
    leases[slot, 1] = LEASE_ACTIVE
    return bool(leases[slot, 0] == generation)


def finish_lease(leases: npt.NDArray[np.int64], slot: int, generation: int) -> None:
    """Engine side: the request is gone; the API process may free its segments."""
    if leases[slot, 0] == generation:
        leases[slot, 1] = LEASE_DONE
