"""Memories straight out of a tool: ``inferscale encode --source mem0:https://...``.

The tool's list of users is whole, so a user whose facts came from there and who is listed no more
has lost them. Who that is, the store itself tells: no other state is needed, and a new store gets
everything.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from inferscale_runtime.encode.input import InputParser, UserInput
from inferscale_runtime.encode.sources import ByteLimit
from inferscale_runtime.encode.status import LINE_SECONDS
from inferscale_runtime.errors import StoreFormatError
from inferscale_runtime.importing.answers import Reader
from inferscale_runtime.importing.folder import encode_lines
from inferscale_runtime.importing.records import ToolMemory, clean, to_lines
from inferscale_runtime.importing.sync import nobody_left
from inferscale_runtime.importing.tools import open_reader, parse_options, split_source
from inferscale_runtime.store.store import Store

EMPTY_FLAG = "--allow-empty-source"


@dataclass(frozen=True, slots=True)
class ToolSource:
    """What the command line says about a tool.

    Attributes:
        name: ``TOOL[:PLACE]``.
        options: ``KEY=VALUE``.
        token_file: File with the API key, or None.
        allow_empty: Whether a tool without users deletes all that came from it.
    """

    name: str
    options: Sequence[str] = ()
    token_file: str | None = None
    allow_empty: bool = False

    def open(self) -> Reader:
        """Makes the reader.

        Raises:
            ConfigError: Something of it cannot be used.
        """
        tool, place = split_source(self.name)
        options = parse_options(tool, self.options)
        return open_reader(tool, place, options, self.token_file, "--source-token-file")


def read_tool(
    source: ToolSource, url: str, wanted: Callable[[str], bool], max_bytes: int
) -> dict[str, UserInput]:
    """Reads the wanted users.

    Args:
        source: The tool.
        url: URL of the store that is written afterwards; there may be none yet.
        wanted: Whether a user belongs to this job.
        max_bytes: Most bytes of all lines together.

    Returns:
        User id -> input; a user that the tool does not list any more has none left.

    Raises:
        InferScaleError: The tool cannot be read whole; nothing was changed.
    """
    reader, store = source.open(), _opened(url)
    try:
        listed = reader.users()
        names = {user.id for user in listed}
        known = filter(lambda user: wanted(user) and user not in names, _users(store))
        gone = [user for user in known if _holds(store, user, reader.origin)]
        if not listed and gone and not source.allow_empty:
            raise nobody_left(reader.origin, reader.source, len(gone), EMPTY_FLAG)
        _tell_skipped(reader)
        parser, limit = InputParser(), ByteLimit(max_bytes)
        mine = [user for user in listed if wanted(user.id)]
        spoken = time.monotonic()
        for number, user in enumerate(mine):
            if time.monotonic() - spoken >= LINE_SECONDS:
                spoken = time.monotonic()
                print(f"{reader.origin}: {number} of {len(mine)} users read", file=sys.stderr)
            _add(parser, limit, reader, user.id, clean(reader.read(user, ToolMemory())))
        for name in gone:
            _add(parser, limit, reader, name, ToolMemory())
        return parser.finish()
    finally:
        reader.close()


def _add(
    parser: InputParser, limit: ByteLimit, reader: Reader, user: str, memory: ToolMemory
) -> None:
    lines = encode_lines(to_lines(user, reader.origin, memory)).splitlines(keepends=True)
    limit.spend(sum(map(len, lines)), reader.source)
    parser.add(lines, reader.source)


def _users(store: Store | None) -> Iterator[str]:
    return iter(()) if store is None else store.users()


def _holds(store: Store | None, user: str, origin: str) -> bool:
    """Whether a user has something of an origin."""
    memory = store.read_user(user) if store is not None else None
    if memory is None:
        return False
    origins = {fact.origin for fact in memory.facts} | {turn.origin for turn in memory.turns}
    return origin in origins


def _opened(url: str) -> Store | None:
    try:
        return Store.open(url)
    except StoreFormatError:
        return None  # there is none yet; whatever else is wrong shows when it is written


def _tell_skipped(reader: Reader) -> None:
    for reason, count in reader.skipped().items():
        print(f"{reader.origin}: left out: {reason}: {count}", file=sys.stderr)
