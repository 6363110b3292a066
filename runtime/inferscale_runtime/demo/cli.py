"""The command ``inferscale demo``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(subparsers: Any) -> None:
    """Adds the command.

    Args:
        subparsers: What ``add_subparsers`` of the ``inferscale`` parser returned.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="encode a sample memory, serve it, ask questions and measure TTFT on this machine",
    )
    parser.add_argument("--workdir", type=Path, default=Path("build/demo"), metavar="DIR")
    parser.add_argument("--json", type=Path, default=Path("build/demo.json"), metavar="FILE")
    parser.add_argument("--repeats", type=int, choices=range(1, 11), default=3, metavar="N")
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    from inferscale_runtime.demo.run import run_demo

    run_demo(args.workdir, args.json, args.repeats)
    return 0
