"""Which tier each store of a model gets, from what its server pods report (pure).

One plan serves all pods of a model: they are alike, so the smallest one's room counts. The DRAM
arena is divided first, because a segment in GPU memory is a copy of one in DRAM; then the GPU
arena.

Each tier is filled like a knapsack that takes parts: first the floors, then the stores that were
placed by name, then the ``Auto`` ones; within these by priority, and within a priority by heat per
byte. Taking parts in that order gives the most hits that the room allows.

Hysteresis: what a store has from the plan before counts ``(1 + threshold)`` times its heat, so a
store is pushed out only by one that is hotter per byte by more than the threshold. The GPU budget
follows the driver's figures only when they differ by more than the threshold or force it down.

Without fresh figures of every pod the plan before is returned as it is, with
``metrics_fresh=False``.

Signature::

    plan_placement(
        pods: Iterable[PodFigures],
        stores: Iterable[StoreDemand],
        previous: PlacementPlan | None,
        settings: PlacementSettings,
    ) -> PlacementPlan
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Placement = Literal["Auto", "GPU", "DRAM", "Disk"]
Tier = Literal["gpu", "dram", "disk"]

GPU_GRANULE = 64 << 20
"""GPU budgets are whole multiples, so that the plan does not follow every allocation."""

SHARED_PART = 32
"""One part in this of the DRAM arena is granted to nobody: the preambles and stores without a grant
work in it."""

DISK_CEILING_PART = 8
"""A store placed on disk may use at most one part in this of the DRAM arena at a time: a request
can only use what is in memory."""


@dataclass(frozen=True, slots=True)
class PodFigures:
    """What one ready server pod reports.

    Attributes:
        name: Of the pod.
        age_seconds: Since the figures were taken.
        dram_capacity_bytes: Size of its DRAM arena, or None when it did not say.
        gpu_free_bytes: Free memory of each of its GPUs as the driver sees it; empty when the driver
            did not answer.
        gpu_arena_bytes: What its GPU arena has allocated now, per GPU.
    """

    name: str
    age_seconds: float
    dram_capacity_bytes: int | None
    gpu_free_bytes: tuple[int, ...] = ()
    gpu_arena_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoreDemand:
    """One store of the model.

    Attributes:
        name: As in the server's configuration.
        num_bytes: KV of all its segments.
        heat: Segments asked for per second, summed over the pods.
        placement: From its spec.
        priority: Higher goes first, whatever the heat.
        floor_bytes: DRAM that other stores cannot take.
    """

    name: str
    num_bytes: int
    heat: float = 0.0
    placement: Placement = "Auto"
    priority: int = 0
    floor_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """How to plan.

    Attributes:
        gpu_arena_bytes: Most GPU arena per GPU (the size at start); 0 without one.
        gpus_per_pod: GPUs that share a store's heads.
        gpu_reserve_bytes: Free memory per GPU that stays vLLM's.
        threshold: Least relative gain of a move.
        max_age_seconds: Older figures are stale.
    """

    gpu_arena_bytes: int = 0
    gpus_per_pod: int = 1
    gpu_reserve_bytes: int = 1 << 30
    threshold: float = 0.25
    max_age_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class StorePlacement:
    """What one store gets.

    Attributes:
        name: The store.
        tier: ``gpu`` when half of it is granted there (or the whole arena), else ``dram`` when a
            quarter of it (or of the arena) is granted there, else ``disk``: its segments stay in
            memory only while nobody else needs the room.
        dram_bytes: Granted DRAM.
        gpu_bytes: Granted GPU memory, over the pod's GPUs.
        floor_bytes: DRAM that other stores cannot take.
        ceiling_bytes: Most DRAM, or None.
        reason: Why, for status and events.
    """

    name: str
    tier: Tier
    dram_bytes: int
    gpu_bytes: int
    floor_bytes: int
    ceiling_bytes: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The plan of one model.

    Attributes:
        dram_bytes: Budget of each pod's DRAM arena; None until a pod has said how large it is.
        gpu_bytes: Budget of the GPU arena per GPU.
        stores: By name.
        metrics_fresh: Whether fresh figures of every pod went into it.
        reason: Why not, or ``""``.
        age_seconds: Age of the oldest figures that went into it.
    """

    dram_bytes: int | None = None
    gpu_bytes: int = 0
    stores: tuple[StorePlacement, ...] = ()
    metrics_fresh: bool = False
    reason: str = ""
    age_seconds: float = 0.0

    def document(self) -> dict[str, object]:
        """The plan file of the pods: the runtime's ``TierPlan``, without stores without limits."""
        return {
            "version": 1,
            "dram_bytes": self.dram_bytes,
            "gpu_bytes": self.gpu_bytes,
            "stores": {
                store.name: {
                    "tier": store.tier,
                    "floor_bytes": store.floor_bytes,
                    "ceiling_bytes": store.ceiling_bytes,
                }
                for store in self.stores
                if store.tier != "dram" or store.floor_bytes or store.ceiling_bytes is not None
            },
        }


def plan_placement(
    pods: Iterable[PodFigures],
    stores: Iterable[StoreDemand],
    previous: PlacementPlan | None,
    settings: PlacementSettings,
) -> PlacementPlan:
    """Plans the tiers of one model.

    Args:
        pods: Its ready pods, in any order.
        stores: Its stores, in any order.
        previous: The plan that the pods follow now.
        settings: How to plan.

    Raises:
        ValueError: When two stores have one name.
    """
    before = previous or PlacementPlan()
    figures = sorted(pods, key=lambda pod: pod.name)
    demands = sorted(stores, key=lambda store: store.name)
    if len({store.name for store in demands}) < len(demands):
        raise ValueError("two stores have one name")
    stale = _why_stale(figures, settings)
    if stale:
        return replace(before, metrics_fresh=False, reason=stale)
    dram = min(pod.dram_capacity_bytes or 0 for pod in figures)
    gpu = _gpu_budget(figures, before.gpu_bytes, settings)
    held = {store.name: store for store in before.stores}
    granted = dram - dram // SHARED_PART
    in_dram = _fill(
        granted,
        [
            _Want(
                store,
                0 if store.placement == "Disk" else store.num_bytes,
                min(store.floor_bytes, store.num_bytes),
                held[store.name].dram_bytes if store.name in held else 0,
                store.placement in ("DRAM", "GPU"),
            )
            for store in demands
        ],
        settings.threshold,
    )
    in_gpu = _fill(
        gpu * settings.gpus_per_pod,
        [
            _gpu_want(store, in_dram[store.name], held.get(store.name))
            for store in demands
            if store.placement in ("GPU", "Auto")
        ],
        settings.threshold,
    )
    room = _Room(dram, granted, gpu * settings.gpus_per_pod)
    return PlacementPlan(
        dram,
        gpu,
        tuple(
            _place(store, in_dram[store.name], in_gpu.get(store.name, 0), room) for store in demands
        ),
        True,
        "",
        max(pod.age_seconds for pod in figures),
    )


def _why_stale(pods: list[PodFigures], settings: PlacementSettings) -> str:
    if not pods:
        return "no ready pod reports figures"
    for pod in pods:
        if pod.age_seconds > settings.max_age_seconds:
            # Without the age: whoever shows it would change it with every look.
            return f"pod {pod.name}: figures are older than {settings.max_age_seconds:.0f} s"
        if pod.dram_capacity_bytes is None:
            return f"pod {pod.name}: no arena figures"
        if settings.gpu_arena_bytes and not pod.gpu_free_bytes:
            return f"pod {pod.name}: no GPU figures from the driver"
    return ""


def _gpu_budget(pods: list[PodFigures], before: int, settings: PlacementSettings) -> int:
    if not settings.gpu_arena_bytes:
        return 0
    room = min(
        min(pod.gpu_free_bytes) + pod.gpu_arena_bytes - settings.gpu_reserve_bytes for pod in pods
    )
    limit = max(0, min(room, settings.gpu_arena_bytes))
    if before <= limit <= before * (1 + settings.threshold) and before:
        return before
    return limit // GPU_GRANULE * GPU_GRANULE


@dataclass(frozen=True, slots=True)
class _Want:
    store: StoreDemand
    num_bytes: int
    floor: int
    held: int
    by_name: bool


def _gpu_want(store: StoreDemand, in_dram: int, before: StorePlacement | None) -> _Want:
    held = before.gpu_bytes if before else 0
    by_name = store.placement == "GPU"
    # A cold store is not copied to a GPU; what is there stays while nobody needs the room.
    wanted = in_dram if by_name or store.heat > 0 else min(held, in_dram)
    return _Want(store, wanted, 0, held, by_name)


def _fill(capacity: int, wants: list[_Want], threshold: float) -> dict[str, int]:
    """Bytes of each store; the sum stays within the capacity."""
    parts: list[tuple[tuple[float | str, ...], str, int]] = []
    for want in wants:
        store = want.store
        value = store.heat / max(1, store.num_bytes)
        kept = max(0, min(want.held, want.num_bytes) - want.floor)
        new = max(0, want.num_bytes - want.floor - kept)
        by_name = 1 if want.by_name else 2
        for group, size, worth, order in (
            (0, want.floor, 0.0, 0),
            (by_name, kept, value * (1 + threshold), 0),
            (by_name, new, value, 1),
        ):
            if size:
                rank = (group, -store.priority, -worth, order, store.name)
                parts.append((rank, store.name, size))
    parts.sort()
    result = {want.store.name: 0 for want in wants}
    for _, name, size in parts:
        part = min(size, capacity)
        result[name] += part
        capacity -= part
    return result


@dataclass(frozen=True, slots=True)
class _Room:
    dram: int
    granted: int
    gpu: int


def _place(store: StoreDemand, dram: int, gpu: int, room: _Room) -> StorePlacement:
    size = store.num_bytes
    floor = min(dram, store.floor_bytes)
    if store.placement == "Disk":
        ceiling = max(floor, room.dram // DISK_CEILING_PART)
        return StorePlacement(
            store.name, "disk", dram, 0, floor, ceiling, "placed on disk by its spec"
        )
    if store.placement in ("DRAM", "GPU"):
        floor = dram
    tier: Tier = "disk"
    if gpu and (2 * gpu >= size or gpu == room.gpu):
        tier = "gpu"
    elif 4 * dram >= min(size, room.granted):
        tier = "dram"
    return StorePlacement(
        store.name, tier, dram, gpu, floor, None, _reason(store, tier, dram, gpu, room)
    )


def _reason(store: StoreDemand, tier: Tier, dram: int, gpu: int, room: _Room) -> str:
    size = store.num_bytes
    if store.placement == "GPU" and not room.gpu:
        return f"asked for GPU, but the pods have no GPU arena; {dram} of {size} B in DRAM"
    if store.placement == "GPU":
        return f"asked for GPU: {gpu} of {size} B fit, {dram} B in DRAM"
    if store.placement == "DRAM":
        return f"asked for DRAM: {dram} of {size} B fit"
    heat = f"{store.heat:.3g} segments a second on {size} B, priority {store.priority}"
    if tier == "gpu":
        return f"{heat}: {gpu} B in GPU memory, {dram} B in DRAM"
    if tier == "dram":
        return f"{heat}: {dram} B in DRAM"
    return f"{heat}: hotter stores fill the DRAM arena, {dram} B left for it"
