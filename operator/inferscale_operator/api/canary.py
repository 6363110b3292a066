"""The canary: what a PersonalizedModel asks of it, and what its status says."""

from __future__ import annotations

from pydantic import Field

from inferscale_operator.api.rules import Struct


class Canary(Struct):
    """Prompts that the servers score as text and as injected, and how far these may be apart."""

    sample: float = Field(0.01, ge=0, le=1)
    """Share of users' injected requests that are scored afterwards."""
    start_samples: int = Field(3, ge=0, le=100)
    """Prompts of each store that a server scores before it is ready, and again when the store is
    degraded."""
    kl_limit: float = Field(0.2, ge=0.001, le=100)
    """Most nats of KL(text || injected), mean over the window. Above it the store goes as text."""
    top1_limit: float = Field(0.6, ge=0, le=1)
    """Least share of positions at which both expect the same token most."""
    window: int = Field(20, ge=1, le=10_000)
    """Latest prompts that the means are taken over."""
    recheck_seconds: int = Field(300, ge=1, le=86_400)
    """How long a degraded store goes as text before it is tried again."""


class StoreCanaryStatus(Struct):
    """The worst figures of one store over the server pods."""

    name: str = Field(max_length=253)
    """Name of the MemoryStore."""
    state: str = Field(max_length=16)
    """``ok`` or ``degraded``."""
    kl: float = Field(0, ge=0)
    """KL(text || injected) in nats."""
    top1_agreement: float = Field(0, ge=0, le=1)
    """Share of positions with the same most likely token."""
    samples: int = Field(0, ge=0)
    """Prompts behind the figures."""
