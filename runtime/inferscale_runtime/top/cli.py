"""``inferscale top``: arguments and the refresh."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.top.fetch import Answer, check_url, expand, fetch_all
from inferscale_runtime.top.view import render

CLEAR = "\x1b[H\x1b[2J"


def register(subparsers: Any) -> None:
    """Adds the command."""
    top = subparsers.add_parser(
        "top",
        help="show live tiers, hits and GPU memory of servers",
        description="Reads /inferscale/v1/status of each server and shows it as a table that "
        "refreshes until Ctrl-C.",
    )
    top.add_argument(
        "--url", action="append", help="a server; may be repeated; http://127.0.0.1:8000 if absent"
    )
    top.add_argument(
        "--all-addresses",
        action="store_true",
        help="one row for each address behind a host name (the pods of a headless Service)",
    )
    top.add_argument("--api-key-file", help="file with the API key of the servers")
    top.add_argument("--interval", type=float, default=2.0, help="seconds between two looks")
    top.add_argument("--timeout", type=float, default=2.0, help="seconds to wait for a server")
    top.add_argument(
        "--once", action="store_true", help="print one table; status 1 when a server did not answer"
    )
    top.set_defaults(func=run_top)


def run_top(arguments: argparse.Namespace) -> int:
    """Shows the table once or until interrupted."""
    for name in ("interval", "timeout"):
        if not 0 < getattr(arguments, name) <= 3600:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: give seconds above 0")
    urls = [check_url(url) for url in arguments.url or ["http://127.0.0.1:8000"]]
    key = _read_key(arguments.api_key_file)
    previous: dict[str, Answer] = {}
    while True:
        # Resolved each time: pods come and go.
        asked = [u for url in urls for u in (expand(url) if arguments.all_addresses else [url])]
        answers = fetch_all(asked, key, arguments.timeout)
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else 10_000
        head = "" if arguments.once else time.strftime("%H:%M:%S\n\n")
        text = head + render(answers, previous, width)
        print((CLEAR if terminal and not arguments.once else "") + text, flush=True)
        if arguments.once:
            return int(any(answer.problem for answer in answers))
        previous = {answer.pod: answer for answer in answers if not answer.problem}
        time.sleep(arguments.interval)


def _read_key(path: str | None) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"--api-key-file '{path}': {error.strerror}") from error
