"""What pods and nodes said lately, kept from pass to pass.

A pod that does not answer at once is not a pod without figures: its last answer counts, with its
age. Nodes are read only for models that ask for GPUs, and at most once a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.cluster.base import Cluster
from inferscale_operator.cluster.errors import InvalidError
from inferscale_operator.desired.kinds import NODE, PERSONALIZED_MODEL, Manifest
from inferscale_operator.desired.naming import GENERATION
from inferscale_operator.desired.paths import HTTP_PORT
from inferscale_operator.desired.quantities import asks_for_gpus
from inferscale_operator.planner.tiers import ready_pods

STATUS_PATH = "/inferscale/v1/status"
GPU_MEMORY_LABEL = "nvidia.com/gpu.memory"
"""Label of GPU feature discovery: MiB of each GPU of a node."""

FORGET_SECONDS = 300.0
"""Older answers are forgotten; long before, they are too old to plan with."""

NODE_SECONDS = 60.0
_PARTS = ("tiers", "gpu", "stores")
_MOST_SELECTORS = 256


@dataclass(frozen=True, slots=True)
class _Answer:
    at: float
    document: Mapping[str, object]


class Figures:
    """Answers of server pods, and memory of GPUs.

    Args:
        cluster: Where to ask.
        clock: Monotonic seconds.
    """

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._nodes: dict[tuple[tuple[str, str], ...], tuple[float, int | None]] = {}

    async def reports(
        self, pods: Sequence[Manifest]
    ) -> tuple[dict[str, Mapping[str, object]], dict[str, float]]:
        """Asks the ready server pods for their status.

        Args:
            pods: Of one PersonalizedModel.

        Returns:
            Documents and their ages in seconds, by name of the pod. A pod that has not answered
            lately is absent.
        """
        generations = {(pod["metadata"].get("labels") or {}).get(GENERATION) for pod in pods}
        asked = [pod for name in generations if name for pod in ready_pods(pods, str(name))]
        answers = await asyncio.gather(
            *(self._cluster.ask_pod(pod, HTTP_PORT, STATUS_PATH) for pod in asked)
        )
        now = self._clock()
        for pod, answer in zip(asked, answers, strict=True):
            if answer is not None:
                kept = {part: answer[part] for part in _PARTS if part in answer}
                self._answers[str(pod["metadata"]["uid"])] = _Answer(now, kept)
        for uid in [uid for uid, old in self._answers.items() if now - old.at > FORGET_SECONDS]:
            del self._answers[uid]
        known = {
            str(pod["metadata"]["name"]): self._answers[str(pod["metadata"]["uid"])]
            for pod in asked
            if str(pod["metadata"]["uid"]) in self._answers
        }
        return (
            {name: answer.document for name, answer in known.items()},
            {name: now - answer.at for name, answer in known.items()},
        )

    async def gpu_memory(self, resource: Manifest) -> int | None:
        """Bytes of the smallest GPU on the nodes that a model's pods may run on.

        Returns:
            None when the resource asks for no GPU, when no node tells, or without the right to
            list nodes.

        Raises:
            ClusterError: Nodes could not be read just now.
        """
        selector = _gpu_nodes(resource)
        if selector is None:
            return None
        key = tuple(sorted(selector.items()))
        now = self._clock()
        known = self._nodes.get(key)
        if known is None or now - known[0] > NODE_SECONDS:
            if len(self._nodes) >= _MOST_SELECTORS:
                self._nodes.clear()
            known = self._nodes[key] = (now, await self._smallest_gpu(selector))
        return known[1]

    async def _smallest_gpu(self, selector: Mapping[str, str]) -> int | None:
        try:
            nodes = await self._cluster.list(NODE, None, selector)
        except InvalidError:
            return None
        labels = [
            (node["metadata"].get("labels") or {}).get(GPU_MEMORY_LABEL, "") for node in nodes
        ]
        sizes = [int(text) << 20 for text in labels if text.isdecimal() and int(text) > 0]
        return min(sizes, default=None)


def _gpu_nodes(resource: Manifest) -> dict[str, str] | None:
    """Node selector of a model that asks for GPUs; None for all others."""
    if resource["kind"] != PERSONALIZED_MODEL.kind:
        return None
    try:
        serving = PersonalizedModelSpec.model_validate(resource.get("spec") or {}).serving
    except ValidationError:
        return None
    if not asks_for_gpus(serving.resources, serving.tensor_parallel_size):
        return None
    return dict(serving.node_selector)
