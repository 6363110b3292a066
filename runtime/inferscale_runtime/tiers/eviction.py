"""Which segments make room in the DRAM arena (pure; one lock of the caller's around all of it).

Least recently used first, within the limits of the stores:

- Together the segments stay within the budget. What requests hold is never taken: after the budget
  has shrunk it drains, and nothing new comes in meanwhile.
- A store stays within its ceiling by giving up its own segments.
- No segment is taken for another store's sake when its store would fall below its floor; only when
  all unpinned segments together exceed the budget do floors give way.
- Segments of a store of tier ``disk`` go before all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Tier = Literal["gpu", "dram", "disk"]


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What one store may hold in the arena.

    Attributes:
        floor: Rows that others cannot take from it.
        ceiling: Most rows; None is no limit.
        tier: ``disk``: its segments stay only while nobody else needs the room.
    """

    floor: int = 0
    ceiling: int | None = None
    tier: Tier = "dram"


@dataclass(slots=True, eq=False)
class Resident:
    """One segment in the arena.

    Attributes:
        key: Segment key.
        store: Whose it is.
        runs: Where it lies.
        rows: Its tokens.
        pins: How many leases and holds keep it.
        used: When it was last used, as a count.
        erased: Its rows are to be wiped when they are freed.
    """

    key: str
    store: str
    runs: tuple[tuple[int, int], ...]
    rows: int
    pins: int = 0
    used: int = 0
    erased: bool = False


@dataclass(slots=True)
class _Store:
    limits: StoreLimits = StoreLimits()
    rows: int = 0
    pinned: int = 0
    segments: int = 0
    # Unpinned segments, least recently used first.
    idle: OrderedDict[Resident, None] = field(default_factory=OrderedDict)


class EvictionPolicy:
    """Bookkeeping of rows and the choice of victims.

    Args:
        budget: Rows that all segments may take together.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows = 0
        self.pinned = 0
        self._stores: dict[str, _Store] = {}
        self._clock = 0

    def rows_of(self, store: str) -> tuple[int, int, int]:
        """Rows, rows held by leases, and segments of one store."""
        found = self._stores.get(store) or _Store()
        return found.rows, found.pinned, found.segments

    def limits_of(self, store: str) -> StoreLimits:
        """Limits of one store."""
        return self._store(store).limits

    @property
    def stores(self) -> tuple[str, ...]:
        """Every store that holds segments or has limits."""
        return tuple(self._stores)

    def configure(self, budget: int, limits: Mapping[str, StoreLimits]) -> None:
        """Sets new limits; a store that is not named has none. Evicts nothing by itself."""
        self.budget = budget
        for name in {*self._stores, *limits}:
            self._store(name).limits = limits.get(name, StoreLimits())
        for name in [n for n, s in self._stores.items() if not s.segments and n not in limits]:
            del self._stores[name]

    def add(self, entry: Resident) -> None:
        """Takes a new segment into the books."""
        store = self._store(entry.store)
        store.rows += entry.rows
        store.segments += 1
        self.rows += entry.rows
        if entry.pins:
            store.pinned += entry.rows
            self.pinned += entry.rows
        else:
            self._touch(store, entry)

    def remove(self, entry: Resident) -> None:
        """Takes a segment out of the books."""
        store = self._store(entry.store)
        store.rows -= entry.rows
        store.segments -= 1
        self.rows -= entry.rows
        if entry.pins:
            store.pinned -= entry.rows
            self.pinned -= entry.rows
        else:
            del store.idle[entry]

    def pin(self, entry: Resident) -> None:
        """One more lease holds the segment."""
        if not entry.pins:
            store = self._store(entry.store)
            del store.idle[entry]
            store.pinned += entry.rows
            self.pinned += entry.rows
        entry.pins += 1

    def unpin(self, entry: Resident) -> None:
        """One lease less; without any the segment is the most recently used."""
        entry.pins -= 1
        if not entry.pins:
            store = self._store(entry.store)
            store.pinned -= entry.rows
            self.pinned -= entry.rows
            self._touch(store, entry)

    def touch(self, entry: Resident) -> None:
        """A request is going to use the segment: it becomes the most recently used."""
        if not entry.pins:
            store = self._store(entry.store)
            del store.idle[entry]
            self._touch(store, entry)

    def victims_for(self, store: str, rows: int) -> list[Resident] | None:
        """Segments whose eviction makes room for a new one.

        Args:
            store: Whose the new segment is.
            rows: Its tokens.

        Returns:
            The victims, or None when the limits and pins leave no room; nothing is changed.
        """
        limits = self._store(store).limits
        choice = _Choice(self._stores)
        if limits.ceiling is not None:
            while choice.rows_of(store) + rows > limits.ceiling:
                if not choice.take_from(store):
                    return None
        while self.rows - choice.freed + rows > self.budget:
            if not choice.take(own=store):
                return None
        return choice.victims

    def overflow(self) -> list[Resident]:
        """Segments to evict now because limits shrank or pins went."""
        choice = _Choice(self._stores)
        for name, store in self._stores.items():
            ceiling = store.limits.ceiling
            while ceiling is not None and choice.rows_of(name) > ceiling:
                if not choice.take_from(name):
                    break
        while self.rows - choice.freed > self.budget and choice.take(own=None):
            pass
        # Pinned segments may fill the budget while floors protect the rest.
        while self.rows - choice.freed - self.pinned > self.budget:
            assert choice.take(own=None, floors=False), "unpinned rows without a segment"
        return choice.victims

    def _store(self, name: str) -> _Store:
        return self._stores.setdefault(name, _Store())

    def _touch(self, store: _Store, entry: Resident) -> None:
        self._clock += 1
        entry.used = self._clock
        store.idle[entry] = None


class _Choice:
    """Victims picked so far, without touching the books."""

    def __init__(self, stores: Mapping[str, _Store]) -> None:
        self._stores = stores
        self._idle = {name: iter(store.idle) for name, store in stores.items()}
        self._heads = {name: next(idle, None) for name, idle in self._idle.items()}
        self._freed: dict[str, int] = {}
        self.freed = 0
        self.victims: list[Resident] = []

    def rows_of(self, store: str) -> int:
        return self._stores[store].rows - self._freed.get(store, 0)

    def take_from(self, store: str) -> bool:
        head = self._heads[store]
        if head is None:
            return False
        self._heads[store] = next(self._idle[store], None)
        self._freed[store] = self._freed.get(store, 0) + head.rows
        self.freed += head.rows
        self.victims.append(head)
        return True

    def take(self, *, own: str | None, floors: bool = True) -> bool:
        """Takes the best victim of any store; ``own`` may go below its floor for its own sake."""
        best: tuple[tuple[bool, int], str] | None = None
        for name, head in self._heads.items():
            if head is None:
                continue
            limits = self._stores[name].limits
            if floors and name != own and self.rows_of(name) - head.rows < limits.floor:
                continue
            rank = (limits.tier != "disk", head.used)
            if best is None or rank < best[0]:
                best = (rank, name)
        return best is not None and self.take_from(best[1])
