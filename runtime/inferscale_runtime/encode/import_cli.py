"""``inferscale import``: arguments only; the work is in ``importing``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscale_runtime.errors import ConfigError

if TYPE_CHECKING:
    from inferscale_runtime.importing.answers import Reader
    from inferscale_runtime.importing.sync import SyncReport

LINE_SECONDS = 10.0
"""Least time between two progress lines (arbitrary)."""

_PLACES = {
    "mem0": "URL of Mem0's server, https://api.mem0.ai, or the library's configuration file",
    "zep": "URL of Zep, https://api.getzep.com by default",
    "letta": "URL of Letta, https://api.letta.com by default",
}


def register(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "import",
        help="read memories out of Mem0, Zep, Letta or LoCoMo",
        description="Writes the input lines of 'inferscale encode'. Run again, it reads what "
        "changed, and what is gone there is deleted.",
    )
    tools = parser.add_subparsers(title="sources", dest="tool", metavar="SOURCE")
    for tool, place in _PLACES.items():
        _add_tool(tools, tool, place)
    locomo = tools.add_parser("locomo", help="convert LoCoMo data to input lines on stdout")
    locomo.add_argument("file", help="locomo10.json")
    locomo.set_defaults(func=run_locomo)


def _add_tool(tools: Any, tool: str, place: str) -> None:
    command = tools.add_parser(tool, help=f"read {tool}")
    command.add_argument("place", nargs="?" if tool != "mem0" else None, default="", help=place)
    command.add_argument(
        "--out",
        required=True,
        help="folder that follows the tool, an --input of encode; - writes all lines to stdout",
    )
    command.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"holds the API key; without it, ${tool.upper()}_API_KEY does",
    )
    command.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="see docs/sources.md; may be repeated",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="write nothing, print what would change by user"
    )
    command.add_argument(
        "--allow-empty", action="store_true", help="a tool without users deletes everybody"
    )
    command.add_argument("--json", metavar="FILE", help="write the report to this file")
    command.set_defaults(func=run_import)


def run_locomo(arguments: argparse.Namespace) -> int:
    """Writes converted lines to stdout."""
    from inferscale_runtime.encode.locomo import convert

    for line in convert(arguments.file):
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    return 0


def run_import(arguments: argparse.Namespace) -> int:
    """Reads a tool."""
    from inferscale_runtime.importing.tools import open_reader, parse_options, split_source

    place = split_source(f"{arguments.tool}:{arguments.place}")[1]
    options = parse_options(arguments.tool, arguments.option)
    reader = open_reader(arguments.tool, place, options, arguments.token_file, "--token-file")
    with closing(reader):
        if arguments.out == "-":
            return _print_lines(reader, arguments)
        # Another option is another memory.
        told = "".join(f" {key}={value}" for key, value in sorted(options.items()))
        return _follow(reader, reader.source + told, arguments)


def _print_lines(reader: Reader, arguments: argparse.Namespace) -> int:
    from inferscale_runtime.importing.folder import encode_lines
    from inferscale_runtime.importing.records import ToolMemory, clean, to_lines

    if arguments.dry_run or arguments.json:
        raise ConfigError("--out -: --dry-run and --json are for a folder; leave them out")
    users = reader.users()
    _tell_skipped(reader.skipped())
    for user in users:
        lines = to_lines(user.id, reader.origin, clean(reader.read(user, ToolMemory())))
        sys.stdout.buffer.write(encode_lines(lines))
    sys.stdout.buffer.flush()
    return 0


def _follow(reader: Reader, source: str, arguments: argparse.Namespace) -> int:
    from inferscale_runtime.importing.folder import ImportFolder
    from inferscale_runtime.importing.sync import Sync

    folder = ImportFolder(Path(arguments.out))
    sync = Sync(
        reader,
        folder,
        source,
        dry_run=arguments.dry_run,
        allow_empty=arguments.allow_empty,
        progress=_Progress(reader.origin),
    )
    with _nothing() if arguments.dry_run else folder.lock():
        report = sync.run()
    _tell(report, by_user=arguments.dry_run)
    if arguments.json:
        _write_report(arguments.json, report)
    return 0


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Progress:
    def __init__(self, origin: str) -> None:
        self._origin, self._spoken = origin, time.monotonic()

    def __call__(self, report: SyncReport) -> None:
        if time.monotonic() - self._spoken < LINE_SECONDS:
            return
        self._spoken = time.monotonic()
        done = report.read + report.unchanged + report.resumed
        print(f"{self._origin}: {done} of {report.users} users", file=sys.stderr)


def _tell(report: SyncReport, *, by_user: bool) -> None:
    if by_user:
        for user, change in sorted(report.by_user.items()):
            print(f"{user}\t+{change.created} ~{change.updated} -{change.deleted}")
    facts = report.facts
    print(
        f"{report.users} users: {report.read} read, {report.unchanged} unchanged, "
        f"{report.resumed} read before the interruption, {report.gone} gone; facts: "
        f"{facts.created} created, {facts.updated} updated, {facts.deleted} deleted, "
        f"{facts.unchanged} unchanged"
    )
    _tell_skipped(report.skipped)


def _tell_skipped(skipped: dict[str, int]) -> None:
    for reason, count in sorted(skipped.items()):
        print(f"left out: {reason}: {count}", file=sys.stderr)


def _write_report(path: str, report: SyncReport) -> None:
    body = asdict(report)
    del body["by_user"]
    try:
        Path(path).write_text(json.dumps(body) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json '{path}': {error.strerror}; the import is done") from None
