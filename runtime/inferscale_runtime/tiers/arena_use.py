"""What a store has, and may have, of the DRAM arena, in bytes (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from inferscale_runtime.tiers.eviction import StoreLimits, Tier


@dataclass(frozen=True, slots=True)
class StoreUse:
    """What one store has in the arena now.

    Attributes:
        used_bytes: Resident segments.
        pinned_bytes: Of these, held by requests or for good.
        segments: How many.
        floor_bytes: Bytes that other stores cannot take.
        ceiling_bytes: Most bytes, or None.
        tier: ``gpu``, ``dram`` or ``disk``, as planned.
    """

    used_bytes: int
    pinned_bytes: int
    segments: int
    floor_bytes: int
    ceiling_bytes: int | None
    tier: Tier


@dataclass(frozen=True, slots=True)
class ByteLimits:
    """Limits of one store in bytes; see ``StoreLimits``.

    Attributes:
        floor_bytes: Rounded down to whole rows, as is the ceiling.
        ceiling_bytes: None is no limit.
        tier: Planned tier.
    """

    floor_bytes: int = 0
    ceiling_bytes: int | None = None
    tier: Tier = "dram"

    def in_rows(self, row_bytes: int) -> StoreLimits:
        """The same for rows of so many bytes."""
        ceiling = None if self.ceiling_bytes is None else self.ceiling_bytes // row_bytes
        return StoreLimits(self.floor_bytes // row_bytes, ceiling, self.tier)
