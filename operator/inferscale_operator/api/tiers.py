"""Where KV is kept: what the two kinds ask for, and what their status says of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from inferscale_operator.api.base import QUANTITY_PATTERN, Size
from inferscale_operator.api.rules import Rule, Struct
from inferscale_runtime.budget import exact_quantity

GPU_BUDGET_PATTERN = f"^auto$|{QUANTITY_PATTERN}"

GpuBudget = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
    Field(pattern=GPU_BUDGET_PATTERN, max_length=32),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": GPU_BUDGET_PATTERN,
            "maxLength": 32,
        }
    ),
    Rule(
        cel="string(self) == 'auto' || quantity(string(self)).compareTo(quantity('1Mi')) >= 0",
        message="must be auto or at least 1Mi",
        holds=lambda value: value == "auto" or exact_quantity(value) >= exact_quantity("1Mi"),
    ),
]
"""``auto`` or a quantity of bytes."""


class GpuTier(Struct):
    """Memory of each GPU."""

    budget: GpuBudget | None = None
    """Hot KV kept in each GPU's memory, outside vLLM's share. ``auto`` is what vLLM's need leaves,
    at most a quarter of the free memory; it needs ``engineArgs`` without
    ``--gpu-memory-utilization``. Absent: none."""
    headroom_percent: int = Field(5, ge=0, le=50)
    """Part of each GPU's memory that neither vLLM nor the arena gets."""


class Tiers(Struct):
    """Where KV is kept while it is served."""

    gpu: GpuTier = Field(default_factory=GpuTier)
    """GPU memory."""
    dram: Size = "1Gi"
    """Size of the shared-memory arena of each pod. ``/dev/shm`` and the memory request are sized
    from it, with 20 % on top."""
    stage_timeout_ms: int = Field(2000, ge=0, le=600_000)
    """How long a request waits for its facts to be read from disk before they go as text, while
    nothing is read; five times that in all while others are read before it."""


class Placement(Struct):
    """Where the servers keep the KV of this store, as far as their memory goes."""

    tier: Literal["Auto", "GPU", "DRAM", "Disk"] = "Auto"
    """``Auto`` goes by use. ``GPU`` and ``DRAM`` come before that; ``Disk`` keeps the store out of
    the others' way."""
    priority: int = Field(0, ge=0, le=1000)
    """Stores of a higher priority get memory first."""
    floor: Size | None = None
    """Bytes of each server's DRAM arena that other stores cannot take from this one."""


class PlacedStore(Struct):
    """Where the servers keep one store."""

    name: str = Field(max_length=253)
    """Name of the MemoryStore."""
    tier: str = Field(max_length=16)
    """``gpu``, ``dram`` or ``disk``."""
    bytes: int = Field(0, ge=0)
    """Memory that it is granted in each pod: on its GPUs for tier ``gpu``, else in DRAM."""
    reason: str = Field("", max_length=1024)
    """Why, with the figures at the time of the plan."""


class PlacementStatus(Struct):
    """The plan that the server pods follow."""

    planned_at: str | None = Field(None, max_length=32, json_schema_extra={"format": "date-time"})
    """When it last changed."""
    metrics_fresh: bool = False
    """Whether fresh figures of every ready pod say the same; else the last plan stays."""
    dram_bytes: int = Field(0, ge=0)
    """Budget of each pod's DRAM arena."""
    gpu_bytes: int = Field(0, ge=0)
    """Budget of the arena in each GPU."""
    stores: list[PlacedStore] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """By name."""


class BudgetTerm(Struct):
    """One term of the memory budget."""

    scope: str = Field(max_length=16)
    """``gpu``: each GPU; ``pod``: memory of the node."""
    term: str = Field(max_length=64)
    """Its name."""
    bytes: int = Field(0, ge=0)
    """Its size."""
    why: str = Field("", max_length=256)
    """Where the number comes from."""


class BudgetStatus(Struct):
    """How the memory of a server pod with GPUs is divided before it starts."""

    gpu_memory_bytes: int = Field(0, ge=0)
    """Memory of the smallest GPU among the nodes that the pods may run on."""
    gpu_memory_utilization: float | None = Field(None, ge=0, le=1)
    """vLLM's ``--gpu-memory-utilization``."""
    rows: list[BudgetTerm] = Field(
        default_factory=list,
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    """The terms."""
