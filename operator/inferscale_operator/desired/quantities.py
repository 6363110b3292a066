"""Quantities of manifests, written as the API server writes them, and the memory of pods.

The API server stores every quantity in one canonical form (``1024Mi`` becomes ``1Gi``, ``0.5``
becomes ``500m``). Manifests are written in it, so that what was applied equals what is read back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from inferscale_operator.api.base import Resources
from inferscale_operator.desired.kinds import Manifest
from inferscale_runtime.budget import (
    GIB,
    MIB,
    MIN_SHM_MARGIN_BYTES,
    TIER_MARGIN_PERCENT,
    BudgetRequest,
    exact_quantity,
    format_quantity,
    parse_quantity,
)

GPU = "nvidia.com/gpu"
"""Resource that is asked for when a spec wants several GPUs and names none."""

ACCELERATOR_DOMAINS = (
    "nvidia.com",
    "amd.com",
    "gpu.intel.com",
    "habana.ai",
    "google.com",
    "aws.amazon.com",
)
"""Domains of device plugins whose resources count as accelerators (MIG slices included)."""

HOST_BASE_BYTES: int = BudgetRequest.model_fields["host_base_bytes"].default
HOST_WORKER_BYTES: int = BudgetRequest.model_fields["host_worker_bytes"].default

_BINARY_SUFFIXES = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL_SUFFIXES = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}
_LARGEST_DECIMAL = 18
_NANO = Fraction(1, 10**9)
_LARGEST = Fraction((1 << 63) - 1)


def canonical_quantity(text: str) -> str:
    """Writes a quantity in the API server's form.

    The rules are those of ``resource.Quantity`` (k8s.io/apimachinery): a binary suffix stays binary
    if the value is a whole number of at least 1024, an exponent stays an exponent, and everything
    else gets the largest decimal suffix that leaves a whole number.

    Args:
        text: A quantity.

    Raises:
        ConfigError: When it is none.
    """
    value = min(Fraction(math.ceil(exact_quantity(text) / _NANO)) * _NANO, _LARGEST)
    if not value:
        return "0"
    if text.endswith("i") and value.denominator == 1 and value >= 1024:
        return _binary(value.numerator)
    mantissa, exponent = _decimal(value)
    if not text[-1].isalpha() and ("e" in text or "E" in text):
        return f"{mantissa}e{exponent}" if exponent else str(mantissa)
    if exponent == _LARGEST_DECIMAL:
        return f"{mantissa}E"
    return f"{mantissa}{_DECIMAL_SUFFIXES[exponent]}"


def _binary(value: int) -> str:
    power = 0
    while value % 1024 == 0 and power < len(_BINARY_SUFFIXES):
        value //= 1024
        power += 1
    return f"{value}{_BINARY_SUFFIXES[power - 1]}" if power else str(value)


def _decimal(value: Fraction) -> tuple[int, int]:
    """Mantissa and exponent, the exponent being the largest possible multiple of 3 up to 18."""
    exponent = _LARGEST_DECIMAL
    while (value / Fraction(10) ** exponent).denominator != 1:
        exponent -= 3
    return int(value / Fraction(10) ** exponent), exponent


def shm_bytes(dram: str) -> int:
    """Size of ``/dev/shm`` for a DRAM tier, in whole MiB.

    The margin is the one of the budget: 20 %, and at least what vLLM's own queues need.
    """
    tier = parse_quantity(dram)
    margin = max(-(-tier * TIER_MARGIN_PERCENT // 100), MIN_SHM_MARGIN_BYTES)
    return -(-(tier + margin) // MIB) * MIB


def format_bytes(value: int) -> str:
    """Bytes in the API server's form, with a binary suffix where it is exact."""
    return canonical_quantity(format_quantity(value))


def has_accelerator(resources: Resources) -> bool:
    """Whether the spec names a GPU or another accelerator."""
    return any(
        name.partition("/")[0] in ACCELERATOR_DOMAINS
        for name in (*resources.requests, *resources.limits)
    )


def asks_for_gpus(resources: Resources, tensor_parallel_size: int) -> bool:
    """Whether server pods get whole NVIDIA GPUs, whose memory nodes tell by a label."""
    if tensor_parallel_size > 1 and not has_accelerator(resources):
        return True
    return any(
        exact_quantity(named[GPU]) > 0
        for named in (resources.requests, resources.limits)
        if GPU in named
    )


def server_resources(resources: Resources, tensor_parallel_size: int, dram: str) -> Manifest:
    """Resources of a server's container.

    ``/dev/shm`` counts as memory of the container, so its size comes on top of what the user asks:
    a spec speaks of the processes, and the tier has a field of its own. Without a memory request
    the processes get what the budget reckons with: 2 GiB for the API process and 2 GiB for each
    rank. On a CPU the weights and the KV cache are in host memory too, and only the user knows
    how large they are: name a request there.

    Args:
        resources: Of the spec.
        tensor_parallel_size: Ranks. Above 1 and without an accelerator in the spec, as many
            ``nvidia.com/gpu`` are asked for. With 1 and none, the server runs on the CPU.
        dram: Size of the DRAM tier.
    """
    extra = {}
    if tensor_parallel_size > 1 and not has_accelerator(resources):
        extra[GPU] = str(tensor_parallel_size)
    base = HOST_BASE_BYTES + tensor_parallel_size * HOST_WORKER_BYTES
    return _resources(resources, extra, base, shm_bytes(dram))


def encoder_resources(resources: Resources, kv_cache: str) -> Manifest:
    """Resources of an encoder's container.

    Without a memory request it gets 4 GiB for its processes and, on the CPU, the KV cache on top.

    Args:
        resources: Of the spec.
        kv_cache: Size of the engine's KV cache.
    """
    base = HOST_BASE_BYTES + HOST_WORKER_BYTES
    if not has_accelerator(resources):
        base += parse_quantity(kv_cache)
    return _resources(resources, {}, base, 0)


def router_resources(resources: Resources) -> Manifest:
    """Resources of a router's container; 100m CPU and 256 MiB where the spec says nothing."""
    manifest = _resources(resources, {}, GIB // 4, 0)
    return manifest | {"requests": {"cpu": "100m"} | manifest["requests"]}


def small_resources() -> Manifest:
    """Resources of a container that only deletes files."""
    return {"requests": {"cpu": "100m", "memory": format_bytes(GIB // 2)}}


def _resources(
    resources: Resources, extra_limits: Mapping[str, str], default_memory: int, on_top: int
) -> Manifest:
    requests = {name: canonical_quantity(text) for name, text in resources.requests.items()}
    limits = {name: canonical_quantity(text) for name, text in resources.limits.items()}
    limits |= extra_limits
    # The API server refuses an extended resource that has a request and no limit.
    limits = {name: text for name, text in requests.items() if "/" in name} | limits
    limit = limits.get("memory")
    request = requests.get("memory") or limit or format_bytes(default_memory)
    requests["memory"] = format_bytes(parse_quantity(request) + on_top) if on_top else request
    if limit is not None and on_top:
        limits["memory"] = format_bytes(parse_quantity(limit) + on_top)
    manifest: Manifest = {"requests": dict(sorted(requests.items()))}
    if limits:
        manifest["limits"] = dict(sorted(limits.items()))
    return manifest
