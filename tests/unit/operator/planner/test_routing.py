"""A router before the servers, over the life of a model."""

from __future__ import annotations

from typing import Any

import pytest
from planner_world import MODEL_SPEC, STORE_SPEC, World

from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.desired.naming import GENERATION

STORE = ("MemoryStore", "maya")
MODEL = ("PersonalizedModel", "chat")
COMPONENT = "app.kubernetes.io/component"
ROUTING = {"provider": "vllm-router"}


@pytest.fixture
def world() -> World:
    world = World()
    world.config_map("facts", {"facts.jsonl": "{}"})
    world.add(*STORE, STORE_SPEC)
    world.add(*MODEL, {**MODEL_SPEC, "routing": ROUTING})
    return world


def deployments(world: World, component: str) -> dict[str, Manifest]:
    return {
        item["metadata"]["labels"][GENERATION]: item
        for item in world.of("chat", "Deployment")
        if item["metadata"]["labels"][COMPONENT] == component
    }


def selected(world: World) -> tuple[str, str]:
    (service,) = world.of("chat", "Service")
    selector = service["spec"]["selector"]
    return selector[COMPONENT], selector[GENERATION]


def serve(world: World) -> str:
    """Everything runs and is ready."""
    world.settle()
    world.finish_all_jobs()
    world.settle()
    world.roll_out_all()
    world.settle()
    (generation,) = deployments(world, "server")
    return generation


def router_pod(world: World, generation: str) -> None:
    labels = {COMPONENT: "router", GENERATION: generation}
    world.pods["router"] = {"metadata": {"name": "router", "labels": labels}, "status": {}}


def test_the_service_leads_to_routers_only_while_one_is_ready(world: World) -> None:
    world.settle()
    world.finish_all_jobs()
    world.settle()
    (generation,) = deployments(world, "server")
    (router,) = deployments(world, "router").values()
    world.roll_out(deployments(world, "server")[generation])
    world.settle()
    assert selected(world) == ("server", generation)
    assert world.condition(*MODEL)["status"] == "True"
    ready = world.condition(*MODEL, "RouterReady")
    assert (ready["status"], ready["reason"]) == ("False", "NoReadyRouter")
    world.roll_out(router)
    world.settle()
    assert selected(world) == ("router", generation)
    assert world.condition(*MODEL, "RouterReady")["status"] == "True"
    router["status"]["readyReplicas"] = 0
    world.settle()
    assert selected(world) == ("server", generation)


def test_a_new_generation_comes_with_routers_of_its_own(world: World) -> None:
    old = serve(world)
    world.edit(*MODEL, serving={"engineArgs": ["--enforce-eager"]})
    world.settle()
    (new,) = deployments(world, "server").keys() - {old}
    assert deployments(world, "router").keys() == {old, new}
    assert selected(world) == ("router", old)
    for router in (deployments(world, "router")[new], deployments(world, "server")[new]):
        world.roll_out(router)
    router_pod(world, old)
    world.settle()
    assert selected(world) == ("router", new)
    # Whoever still holds a connection to the old router is answered until it has ended.
    assert deployments(world, "router").keys() == {new}
    assert deployments(world, "server").keys() == {old, new}
    assert world.condition(*MODEL)["status"] == "False"
    world.pods.clear()
    world.settle()
    assert deployments(world, "server").keys() == {new}
    assert world.condition(*MODEL)["status"] == "True"


def test_without_routing_routers_go_after_the_service_has_moved(world: World) -> None:
    generation = serve(world)
    world.edit(*MODEL, routing={"provider": "none"})
    world.step(*MODEL)
    assert selected(world) == ("server", generation)
    assert deployments(world, "router").keys() == {generation}
    world.settle()
    assert not deployments(world, "router")
    assert not world.of("chat", "Role")
    assert world.condition(*MODEL, "RouterReady") == {}


def test_no_router_holds_back_what_must_not_be_served(world: World) -> None:
    generation = serve(world)
    router_pod(world, generation)
    world.delete(*STORE)
    world.step(*MODEL)
    assert not world.of("chat", "Deployment")


@pytest.mark.parametrize(
    ("waiting", "reason", "text"),
    [
        ({"reason": "ErrImagePull", "message": "no such image"}, "ErrImagePull", "spec.routing"),
        ({"reason": "ContainerCreating"}, "NoReadyRouter", "leads to the servers"),
    ],
)
def test_why_no_router_is_ready(
    world: World, waiting: dict[str, Any], reason: str, text: str
) -> None:
    generation = serve(world)
    deployments(world, "router")[generation]["status"]["readyReplicas"] = 0
    router_pod(world, generation)
    status = {"image": "r:1", "state": {"waiting": waiting}}
    world.pods["router"]["status"] = {"phase": "Pending", "containerStatuses": [status]}
    world.settle()
    found = world.condition(*MODEL, "RouterReady")
    assert found["reason"] == reason
    assert text in found["message"]
    assert world.condition(*MODEL)["status"] == "True"
