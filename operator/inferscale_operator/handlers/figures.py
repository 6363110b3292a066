"""What pods and nodes said lately, kept from pass to pass.

A pod that does not answer at once is not a pod without figures: its last answer counts, with its
age. Nodes are read only for models that ask for GPUs, and at most once a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
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
from inferscale_operator.desired.selection import activator_selector
from inferscale_operator.handlers.exposition import Sample, load_of, read_page
from inferscale_operator.planner.load import PodLoad, total_load
from inferscale_operator.planner.tiers import is_ready, ready_pods

STATUS_PATH = "/inferscale/v1/status"
GPU_MEMORY_LABEL = "nvidia.com/gpu.memory"
"""Label of GPU feature discovery: MiB of each GPU of a node."""

FORGET_SECONDS = 300.0
"""Older answers are forgotten; long before, they are too old to plan with."""

WINDOW_SECONDS = 120.0
"""Times to first token are those of the last two minutes; so is the trend of the load."""

REPEAT_SECONDS = 1.0
"""A pod is asked for its load at most so often: events come in bursts."""

METRICS_PATH = "/metrics"
NODE_SECONDS = 60.0
_PARTS = ("tiers", "gpu", "stores")
_MOST_SELECTORS = 256


@dataclass(frozen=True, slots=True)
class _Answer:
    at: float
    document: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load of a model's servers.

    Attributes:
        loads: By name of pod.
        history: (seconds ago, requests) of the looks of the last minutes.
        held: Requests at the activator.
    """

    loads: Mapping[str, PodLoad]
    history: tuple[tuple[float, float], ...] = ()
    held: int = 0


HeldRequests = Callable[[Manifest], int]
"""Requests that wait for a model at an activator of this process."""


class Figures:
    """Answers of server pods, and memory of GPUs.

    Args:
        cluster: Where to ask.
        clock: Monotonic seconds.
        held: Where the activators run in this process: what waits at them; else pods are asked.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], float] = time.monotonic,
        held: HeldRequests | None = None,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._held = held
        self._samples: dict[str, deque[tuple[float, Sample]]] = {}
        self._history: dict[str, deque[tuple[float, float]]] = {}
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
        asked = _servers(pods)
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

    async def loads(self, resource: Manifest, pods: Sequence[Manifest]) -> LoadReport:
        """Asks the ready servers for their load, and the activator for what waits.

        Args:
            resource: The PersonalizedModel.
            pods: All of its pods.
        """
        servers = _servers(pods)
        pages = await asyncio.gather(*(self._ask_load(pod) for pod in servers))
        held = await self._ask_held(resource, pods)
        now = self._clock()
        for pod, page in zip(servers, pages, strict=True):
            if page is not None:
                looks = self._samples.setdefault(str(pod["metadata"]["uid"]), deque())
                looks.append((now, page))
        self._forget(now)
        loads = {}
        for pod in servers:
            looks = self._samples.get(str(pod["metadata"]["uid"]), deque())
            if looks:
                loads[str(pod["metadata"]["name"])] = load_of(list(looks), now)
        names = [str(pod["metadata"]["name"]) for pod in servers]
        total = total_load(names, loads, held)
        history = self._history.setdefault(str(resource["metadata"]["uid"]), deque())
        if total.fresh and any(page is not None for page in pages):
            history.append((now, total.requests + held))
        return LoadReport(loads, tuple((now - at, value) for at, value in history), held)

    async def _ask_load(self, pod: Manifest) -> Sample | None:
        looks = self._samples.get(str(pod["metadata"]["uid"]))
        if looks and self._clock() - looks[-1][0] < REPEAT_SECONDS:
            return None
        text = await self._cluster.read_pod(pod, HTTP_PORT, METRICS_PATH)
        try:
            return None if text is None else read_page(text)
        except ValueError:
            return None

    async def _ask_held(self, resource: Manifest, pods: Sequence[Manifest]) -> int:
        if self._held is not None:
            return self._held(resource)
        wanted = activator_selector(resource).items()
        activators = [
            pod
            for pod in pods
            if wanted <= (pod["metadata"].get("labels") or {}).items() and is_ready(pod)
        ]
        answers = await asyncio.gather(
            *(self._cluster.ask_pod(pod, HTTP_PORT, STATUS_PATH) for pod in activators)
        )
        counts = [(answer or {}).get("held") for answer in answers]
        return sum(count for count in counts if isinstance(count, int) and count > 0)

    def _forget(self, now: float) -> None:
        for uid, looks in list(self._samples.items()):
            # The newest stays longer: a pod that does not answer has figures with an age.
            while looks and now - looks[0][0] > (
                WINDOW_SECONDS if len(looks) > 1 else FORGET_SECONDS
            ):
                looks.popleft()
            if not looks:
                del self._samples[uid]
        for uid, history in list(self._history.items()):
            while history and now - history[0][0] > WINDOW_SECONDS:
                history.popleft()
            if not history:
                del self._history[uid]

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


def _servers(pods: Sequence[Manifest]) -> list[Manifest]:
    generations = {(pod["metadata"].get("labels") or {}).get(GENERATION) for pod in pods}
    return [pod for name in sorted(filter(None, generations)) for pod in ready_pods(pods, name)]


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
