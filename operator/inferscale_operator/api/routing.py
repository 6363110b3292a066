"""``PersonalizedModel.spec.routing``: a router before the servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from inferscale_operator.api.base import Scheduling
from inferscale_operator.api.rules import Rule


class Routing(Scheduling):
    """A router that keeps each user at one server, whose arenas hold that user's KV.

    Clients name the user in the header ``x-user-id``.
    """

    rules = (
        Rule(
            cel="self.policy != 'stickyLeastLoaded' || self.replicas == 1",
            message="policy stickyLeastLoaded needs replicas 1: routers do not tell each other",
            holds=lambda self: self.policy != "stickyLeastLoaded" or self.replicas == 1,
        ),
    )

    provider: Literal["none", "vllm-router"] = "none"
    """``vllm-router`` runs the vLLM project's router; the Service leads to it as soon as it is
    ready, and to the servers while it is not."""
    policy: Literal["consistentHash", "stickyLeastLoaded"] = "consistentHash"
    """``consistentHash``: a ring over the servers; a new server takes over its share of the users,
    and all others stay. ``stickyLeastLoaded``: a new user goes to the server with the fewest
    users and stays there; needs ``replicas: 1``."""
    replicas: int = Field(2, ge=1, le=32)
    """Router pods."""


__all__ = ["Routing"]
