"""``inferscale serve``: the stock vLLM server with both plugins.

The command becomes the server process (``exec``), so signals and exit codes are vLLM's own.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from inferscale_runtime.config import RuntimeConfig, load_config
from inferscale_runtime.encode.builtin import PREFIX
from inferscale_runtime.encode.cli import base_config
from inferscale_runtime.encode.model import resolve_model
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.packing.shape import KV_DTYPES
from inferscale_runtime.server.explain import add_arguments, explain_budget
from inferscale_runtime.server.leftovers import remove_leftovers

PLUGINS = ("inferscale_connector", "inferscale_memory")
STARTING_S = 60.0
"""A start locks and renames its folder at once; an older one under the first name was killed then
(arbitrary)."""


def register(subparsers: Any) -> None:
    """Adds the command."""
    serve = subparsers.add_parser(
        "serve",
        help="serve a model with injected memory (stock vLLM server plus two plugins)",
        description="Arguments after -- go to vLLM's server as they are.",
    )
    serve.add_argument(
        "--model", required=True, help="model folder, hub id or builtin:smollm2-135m"
    )
    serve.add_argument("--revision", help="branch, tag or commit of a hub id")
    serve.add_argument(
        "--store",
        help="folder or fsspec URL made by 'inferscale encode'; for several, see --config",
    )
    serve.add_argument(
        "--config", help="RuntimeConfig as JSON: stores, retrieval defaults, tiers and the rest"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on")
    serve.add_argument("--dtype", default="auto", help="vLLM dtype; as in 'inferscale encode'")
    serve.add_argument("--served-model-name", help="model name in requests")
    serve.add_argument(
        "--embedder", help="embedder of the questions; that of the store unless it is an endpoint"
    )
    serve.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        help="how the arenas keep KV; as in 'inferscale encode', or nothing is saved",
    )
    serve.add_argument("--dram-bytes", type=int, help="size of the DRAM arena")
    serve.add_argument("--run-root", default="/dev/shm", help="tmpfs folder for the arena")
    add_arguments(serve)
    serve.add_argument("vllm_args", nargs=argparse.REMAINDER, help="-- and vLLM arguments")
    serve.set_defaults(func=run_serve)


def make_run_dir(root: Path) -> Path:
    """Makes a private folder and removes those of servers that are gone.

    A server holds a lock in its folder for as long as it lives, however it dies.
    """
    if not root.is_dir():
        raise ConfigError(f"--run-root '{root}': no such folder; name a tmpfs folder")
    _sweep(root)
    name = f"inferscale-{secrets.token_hex(8)}"
    # Locked under a name that the sweep leaves alone for a while, then renamed: no other start can
    # take a folder whose lock is not held yet for a dead one.
    hidden = root / f".{name}"
    hidden.mkdir(mode=0o700)
    descriptor = os.open(hidden / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.set_inheritable(descriptor, True)
    hidden.rename(root / name)
    return root / name


def _sweep(root: Path) -> None:
    for folder in (*root.glob("inferscale-*"), *root.glob(".inferscale-*")):
        try:
            if folder.name.startswith(".") and time.time() - folder.stat().st_mtime < STARTING_S:
                continue
            with open(folder / "lock", "r+b") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # alive, or another user's


def build_command(arguments: argparse.Namespace, config: RuntimeConfig, folder: str) -> list[str]:
    """The server's command line.

    Args:
        arguments: Of ``inferscale serve``.
        config: For both plugins.
        folder: What vLLM loads: the folder of a built-in model, else ``--model`` as it is.
    """
    transfer = {
        "kv_connector": "InferScaleConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"inferscale": config.model_dump(mode="json")},
    }
    # The module, not the `vllm` command: the CPU distribution's command cannot find its metadata.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", folder, "--host", arguments.host, "--port", str(arguments.port)]
    command += ["--dtype", arguments.dtype, "--kv-transfer-config", json.dumps(transfer)]
    if arguments.revision:
        command += ["--revision", arguments.revision]
    if arguments.served_model_name or folder != arguments.model:
        command += ["--served-model-name", arguments.served_model_name or arguments.model]
    rest = list(arguments.vllm_args)
    return command + (rest[1:] if rest[:1] == ["--"] else rest)


def served_folder(model: str, revision: str | None) -> str:
    """What vLLM is told to load; a hub id is left to vLLM, which loads only this rank's part."""
    if model.startswith(PREFIX) or Path(model).is_dir():
        resolved = resolve_model(model, revision)
        return resolved if model.startswith(PREFIX) else model
    return model


def check_address(host: str, port: int) -> None:
    """Tries the address, so that a wrong one is an error before a model is loaded.

    Raises:
        ConfigError: Naming host and port.
    """
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port {port}: it must lie in 1..65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server itself does: a connection that is still closing is not in the way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there: {error.strerror or error}; choose "
            "another port or address"
        ) from error


def serve_config(arguments: argparse.Namespace) -> RuntimeConfig:
    """The settings of the server; its folder is made later.

    Raises:
        ConfigError: Naming the flag.
    """
    config = base_config(arguments)
    if arguments.store and arguments.config and _names_stores(arguments.config):
        raise ConfigError(
            f"--store '{arguments.store}': --config '{arguments.config}' names 'stores'; leave one "
            "of them out"
        )
    tiers: dict[str, Any] = {}
    if arguments.dram_bytes is not None:
        if arguments.dram_bytes < 1 << 20:
            raise ConfigError(f"--dram-bytes {arguments.dram_bytes}: at least 1048576")
        tiers["dram_bytes"] = arguments.dram_bytes
    if arguments.embedder:
        retrieval = config.retrieval.model_copy(update={"embedder": arguments.embedder})
        config = config.model_copy(update={"retrieval": retrieval})
    if arguments.kv_dtype:
        encoding = config.encoding.model_copy(update={"kv_dtype": arguments.kv_dtype})
        config = config.model_copy(update={"encoding": encoding})
    return config.model_copy(update={"tiers": config.tiers.model_copy(update=tiers)})


def _names_stores(path: str) -> bool:
    return bool(load_config(Path(path).read_text(), path).stores)


def run_serve(arguments: argparse.Namespace) -> int:
    """Checks what can be checked early, then becomes the server."""
    if arguments.explain_budget:
        return explain_budget(arguments)
    config = serve_config(arguments)
    check_address(arguments.host, arguments.port)
    if config.store:
        from inferscale_runtime.store.store import Store

        # One of several may come later; a server whose only store is wrong need not start.
        Store.open(config.store)
    folder = served_folder(arguments.model, arguments.revision)
    remove_leftovers()
    run_dir = make_run_dir(Path(arguments.run_root))
    config = config.model_copy(update={"run_dir": str(run_dir)})
    environment = dict(os.environ)
    others = [name for name in environment.get("VLLM_PLUGINS", "").split(",") if name]
    environment["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*others, *PLUGINS]))
    command = build_command(arguments, config, folder)
    sys.stdout.flush()
    os.execve(command[0], command, environment)
