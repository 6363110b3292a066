"""What the operator was installed with, as far as manifests depend on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the operator was installed with; the same for all resources.

    Attributes:
        runtime_image: Image of jobs and servers whose spec names none.
        operator_namespace: Namespace of the operator, for network policies; None outside a cluster.
        erase_timeout_seconds: Longest time that a deletion waits for its bytes to be erased.
    """

    runtime_image: str
    operator_namespace: str | None = None
    erase_timeout_seconds: int = 600
