"""Load of servers and activators, over the cluster in memory."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from inferscale_operator.cluster.client import pod_address
from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.desired.naming import GENERATION, labels
from inferscale_operator.desired.paths import PORTS_ANNOTATION
from inferscale_operator.handlers.figures import FORGET_SECONDS, REPEAT_SECONDS, Figures
from inferscale_operator.local.memory_cluster import MemoryCluster, counted_uids

pytestmark = pytest.mark.asyncio
MODEL: Manifest = {
    "apiVersion": "inferscale.dev/v1alpha1",
    "kind": "PersonalizedModel",
    "metadata": {"name": "p", "namespace": "ns", "uid": "owner"},
}


def pod(name: str, component: str = "server", **more: str) -> Manifest:
    mark = {GENERATION: "g"} if component == "server" else {}
    return {
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": more.get("uid", f"uid-{name}"),
            "labels": labels(MODEL, component) | mark,
        },
        "spec": {},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def page(running: int, first_tokens: int = 0) -> str:
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        'vllm:num_requests_waiting{engine="0"} 0\n'
        f'vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {first_tokens}\n'
    )


class Told(MemoryCluster):
    """Pods answer as the test says."""

    def __init__(self) -> None:
        super().__init__(
            clock=lambda: datetime(2026, 1, 2, tzinfo=UTC), uids=counted_uids(), read=self._page
        )
        self.seconds = 0.0
        self.pages: dict[str, str | None] = {}
        self.held: dict[str, Any] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.figures = Figures(self, clock=lambda: self.seconds)

    async def _page(self, pod: Manifest, port: str, path: str) -> str | None:
        self.asked.append((pod["metadata"]["name"], port, path))
        return self.pages.get(pod["metadata"]["name"])

    async def ask_pod(self, pod: Manifest, port: str, path: str) -> Any:
        return self.held.get(pod["metadata"]["name"])


async def test_ready_servers_tell_their_load_and_activators_what_they_hold() -> None:
    cluster = Told()
    cluster.pages["a"] = page(3)
    cluster.held["z"] = {"held": 4}
    report = await cluster.figures.loads(MODEL, [pod("a"), pod("z", "activator")])
    assert cluster.asked == [("a", "http", "/metrics")]
    assert report.loads["a"].running == 3
    assert report.loads["a"].names["running"] == "vllm:num_requests_running"
    assert report.held == 4
    assert report.history == ((0.0, 7.0),)


@pytest.mark.parametrize("answer", [None, {}, {"held": "3"}, {"held": -1}, {"held": None}])
async def test_an_activator_that_does_not_say_holds_nothing(answer: Any) -> None:
    cluster = Told()
    cluster.held["z"] = answer
    assert (await cluster.figures.loads(MODEL, [pod("z", "activator")])).held == 0


async def test_a_pod_that_does_not_answer_keeps_its_load_with_its_age() -> None:
    cluster = Told()
    cluster.pages["a"] = page(3)
    await cluster.figures.loads(MODEL, [pod("a")])
    for answer in (None, "vllm:num_requests_running{ broken"):
        cluster.pages["a"] = answer
        cluster.seconds += 20
        report = await cluster.figures.loads(MODEL, [pod("a")])
        assert report.loads["a"].age_seconds == cluster.seconds
    cluster.seconds = FORGET_SECONDS + 1
    assert (await cluster.figures.loads(MODEL, [pod("a")])).loads == {}


async def test_a_pod_made_anew_begins_without_figures() -> None:
    cluster = Told()
    cluster.pages["a"] = page(3)
    await cluster.figures.loads(MODEL, [pod("a")])
    cluster.pages.clear()
    assert (await cluster.figures.loads(MODEL, [pod("a", uid="new")])).loads == {}


async def test_a_burst_of_passes_asks_once() -> None:
    cluster = Told()
    cluster.pages["a"] = page(3)
    for _ in range(5):
        report = await cluster.figures.loads(MODEL, [pod("a")])
        assert report.loads["a"].running == 3
    assert len(cluster.asked) == 1
    cluster.seconds = REPEAT_SECONDS
    await cluster.figures.loads(MODEL, [pod("a")])
    assert len(cluster.asked) == 2


async def test_requests_between_two_looks_are_seen() -> None:
    cluster = Told()
    answered = []
    for tokens in (5, 5, 7):
        cluster.pages["a"] = page(0, tokens)
        report = await cluster.figures.loads(MODEL, [pod("a")])
        answered.append(report.loads["a"].answered)
        cluster.seconds += 10
    assert answered == [None, 0.0, 2.0]


async def test_the_history_is_that_of_the_last_minutes() -> None:
    cluster = Told()
    for requests in range(30):
        cluster.pages["a"] = page(requests)
        report = await cluster.figures.loads(MODEL, [pod("a")])
        cluster.seconds += 10
    assert report.history[0] == (120.0, 17.0)
    assert report.history[-1] == (0.0, 29.0)


async def test_pods_without_a_network_of_their_own_are_asked_on_their_own_ports() -> None:
    port = {"name": "http", "containerPort": 8000}
    there: Manifest = {
        "metadata": {},
        "spec": {"containers": [{"ports": [port]}]},
        "status": {"podIP": "10.0.0.1"},
    }
    assert pod_address(there, "http") == "10.0.0.1:8000"
    assert pod_address(there, "status") is None
    there["metadata"]["annotations"] = {PORTS_ANNOTATION: '{"http": 41234}'}
    assert pod_address(there, "http") == "10.0.0.1:41234"
    for broken in ("{}", "[]", "x", '{"http": null}'):
        there["metadata"]["annotations"] = {PORTS_ANNOTATION: broken}
        assert pod_address(there, "http") is None
