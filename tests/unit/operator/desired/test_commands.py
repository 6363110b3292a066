"""The runtime's own parser and settings model must take what the builders write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inferscale_operator.activator import command as activator_command
from inferscale_runtime.cli import build_parser
from inferscale_runtime.config import load_config

VALUES = {"$(INFERSCALE_PORT)": "8000", "$(JOB_COMPLETION_INDEX)": "0"}


def _expanded(argument: str) -> str:
    for name, value in VALUES.items():
        argument = argument.replace(name, value)
    return argument.replace("$$", "$")


def _router_takes(arguments: list[str]) -> None:
    router = pytest.importorskip("vllm_router.launch_router", reason="no wheel for this machine")
    parsed = router.parse_router_args(arguments)
    assert (parsed.policy, parsed.service_discovery) == ("consistent_hash", True)
    assert parsed.selector["app.kubernetes.io/component"] == "server"
    assert parsed.disable_circuit_breaker


def test_commands_are_those_of_the_runtime(
    case: dict[str, Any], build: Callable[..., list[dict[str, Any]]]
) -> None:
    parser = build_parser()
    commands = 0
    for manifest in build(case):
        template = manifest.get("spec", {}).get("template")
        if template is None:
            continue
        (container,) = template["spec"]["containers"]
        arguments = [*map(_expanded, container["args"])]
        if container["name"] == "router":
            _router_takes(arguments)
            continue
        program, subcommand = container["command"]
        # An unknown or missing argument ends in SystemExit.
        if (program, subcommand) == ("inferscale-operator", activator_command.COMMAND):
            settings = activator_command.read_activator_settings(arguments, {})
            name = case["owner"]["metadata"]["name"]
            assert settings.target == f"http://{name}-servers.{settings.namespace}.svc:80"
            continue
        assert program == "inferscale"
        parsed = parser.parse_args([subcommand, *arguments])
        assert parsed.command == subcommand
        commands += 1
    assert commands


def test_settings_are_those_of_the_runtime(
    case: dict[str, Any], build: Callable[..., list[dict[str, Any]]]
) -> None:
    (config,) = [m for m in build(case) if m["kind"] == "ConfigMap"]
    loaded = load_config(config["data"]["config.json"], "test")
    assert loaded.store_entries
