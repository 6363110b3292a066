"""Whether the watches tell what happens; found out by comparing lists with what was heard.

A watch may be quiet because nothing happens, so silence alone proves nothing. It is deaf when a
list shows a change of which the watch has not told some time later.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from inferscale_operator.desired.kinds import Kind

DEAF_AFTER = 2
"""Comparisons in a row that must show missed changes: between them watching is started anew."""


class Hearing:
    """What is known about the watch of each kind.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_at: dict[str, float] = {}
        self._misses: dict[str, int] = {}

    def heard(self, kind: Kind) -> None:
        """The watch of a kind told something."""
        self._heard_at[kind.kind] = self._clock()

    def compared(self, kind: Kind, missed: int) -> None:
        """A comparison ended; ``missed`` changes were not told in time."""
        self._misses[kind.kind] = self._misses.get(kind.kind, 0) + 1 if missed else 0

    def hard_of_hearing(self) -> list[str]:
        """Kinds whose last comparison showed missed changes."""
        return sorted(kind for kind, count in self._misses.items() if count > 0)

    def deaf(self) -> str | None:
        """Why watching is taken to be deaf, or None."""
        kinds = sorted(kind for kind, count in self._misses.items() if count >= DEAF_AFTER)
        if not kinds:
            return None
        return f"the watch of {', '.join(kinds)} does not tell of changes that a list shows"

    def ages(self) -> dict[str, float]:
        """Seconds since the watch of each kind told something."""
        now = self._clock()
        return {kind: now - at for kind, at in sorted(self._heard_at.items())}
