"""How the encoder is told of a memory tool."""

from __future__ import annotations

from inferscale_operator.api.base import SecretKeyRef
from inferscale_operator.api.memorystore import Source
from inferscale_operator.api.sources import LettaSource, Mem0Source, ZepSource
from inferscale_operator.desired import paths, pod


def token_ref(source: Source) -> SecretKeyRef | None:
    """The Secret with the tool's API key, or None."""
    tool = source.mem0 or source.zep or source.letta
    return tool.token_secret_ref if tool is not None else None


def tool_arguments(source: Source) -> list[str] | None:
    """``--source`` and its options; None when the source is no tool. No secret is among them."""
    options: dict[str, str] = {}
    tool: Mem0Source | ZepSource | LettaSource
    if source.mem0 is not None:
        name, tool = "mem0", source.mem0
        options["api"] = source.mem0.api
        if source.mem0.turns:
            options["turns"] = "true"
    elif source.zep is not None:
        name, tool = "zep", source.zep
        if source.zep.turns:
            options["turns"] = "true"
    elif source.letta is not None:
        name, tool = "letta", source.letta
        options["users-from"] = source.letta.users_from
        options["blocks"] = ",".join(source.letta.blocks)
    else:
        return None
    arguments = ["--source", pod.literal(f"{name}:{tool.url}")]
    for key, value in options.items():
        arguments += ["--source-option", pod.literal(f"{key}={value}")]
    if tool.token_secret_ref is not None:
        arguments += ["--source-token-file", paths.SOURCE_TOKEN_FILE]
    if tool.allow_empty:
        arguments.append("--allow-empty-source")
    return arguments
