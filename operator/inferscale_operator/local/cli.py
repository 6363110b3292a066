"""The command ``inferscale up``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Runs MemoryStores and PersonalizedModels on this machine, without a cluster: the same files as for
kubectl apply, the same pods, as local processes. A file that changes is applied again. Ctrl-C stops
everything in order; the same command goes on where it was.
"""

DOWN_SECONDS = 600.0
"""Longest wait of ``--down``: longer than the grace period of a server with default settings."""


def register(subparsers: Any) -> None:
    """Adds the command.

    Args:
        subparsers: What ``add_subparsers`` of the ``inferscale`` parser returned.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "up", help="run the files of a cluster on this machine", description=DESCRIPTION
    )
    parser.add_argument(
        "-f",
        "--file",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="YAML with MemoryStore, PersonalizedModel, ConfigMap and Secret; may be repeated",
    )
    parser.add_argument(
        "--data-dir", type=Path, default=Path(".inferscale"), metavar="DIR", help="[.inferscale]"
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8000,
        metavar="PORT",
        help="port of the first model on 127.0.0.1; others follow; 0 takes free ones [8000]",
    )
    parser.add_argument(
        "--volume",
        action="append",
        type=_volume,
        default=[],
        metavar="CLAIM=DIR",
        help="folder that stands for an existing PersistentVolumeClaim; may be repeated",
    )
    parser.add_argument(
        "--prune", action="store_true", help="delete what is in no file any more, facts included"
    )
    how_much = parser.add_mutually_exclusive_group()
    how_much.add_argument("--follow-logs", action="store_true", help="print the logs of the pods")
    how_much.add_argument("--quiet", action="store_true", help="print what is ready, and problems")
    parser.add_argument("--down", action="store_true", help="stop the one that runs, and wait")
    parser.add_argument("--volumes", action="store_true", help="with --down: remove the data too")
    parser.set_defaults(func=_run)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is no port; use 0 to 65535")
    return int(text)


def _volume(text: str) -> tuple[str, Path]:
    name, sign, folder = text.partition("=")
    if not (name and sign and folder):
        raise argparse.ArgumentTypeError(f"'{text}': write CLAIM=DIR")
    return name, Path(folder)


def _run(arguments: argparse.Namespace) -> int:
    from inferscale_runtime.budget import ConfigError

    if arguments.down:
        return _down(arguments.data_dir, remove=arguments.volumes)
    if arguments.volumes:
        raise ConfigError("--volumes is for --down: it removes the data")
    if not arguments.file:
        raise ConfigError("name a file with manifests: inferscale up -f FILE")
    for name, folder in arguments.volume:
        if not folder.is_dir():
            raise ConfigError(f"--volume {name}={folder}: there is no such folder; make it first")
    return _up(arguments)


def _down(data: Path, *, remove: bool) -> int:
    from inferscale_operator.local.data_folder import DataFolder

    folder = DataFolder(data)
    pid = folder.stop(DOWN_SECONDS)
    print(f"process {pid} has ended" if pid else f"nothing runs on {folder.path}")
    if remove:
        folder.remove()
        print(f"the data of {folder.path} are removed")
    return 0


def _up(arguments: argparse.Namespace) -> int:
    import asyncio
    import logging
    import signal
    import sys

    from inferscale_operator.local.console import Console
    from inferscale_operator.local.documents import DocumentError
    from inferscale_operator.local.up import Up, UpSettings

    logging.basicConfig(level=logging.WARNING, format="inferscale up: %(message)s")
    settings = UpSettings(
        files=arguments.file,
        data=arguments.data_dir,
        port=arguments.port,
        volumes=dict(arguments.volume),
        prune=arguments.prune,
    )

    async def run() -> None:
        up = Up(settings, Console(logs=arguments.follow_logs, quiet=arguments.quiet))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, up.stop)
        await up.run()

    try:
        asyncio.run(run())
    except DocumentError as error:
        for problem in error.problems:
            print(f"inferscale: error: {problem}", file=sys.stderr)
        return 2
    return 0
