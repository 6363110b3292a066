"""Reads the JSON Lines input of the encoder (docs/input-format.md) and checks every line.

Validation is strict because a silently dropped or misread line would surface only much later, as an
assistant that does not know something. Messages name file, line and field, and never quote a fact:
they end up in Job logs, which more people can read than the memories.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from inferscale_runtime.encode.sources import (
    ByteLimit,
    expand,
    is_http,
    open_source,
    read_authorization,
    read_lines,
    shown,
)
from inferscale_runtime.errors import ConfigError, InputError
from inferscale_runtime.store.fact_changes import API
from inferscale_runtime.store.records import Fact, Turn

MAX_FACT_CHARS = 8192
MAX_USER_BYTES = 512
_ENCODING_FIX = "Save the file as UTF-8"


@dataclass(frozen=True, slots=True)
class UserInput:
    """Everything that the input says about one user.

    Attributes:
        user: The user id.
        facts: In the order in which they were learnt (file order).
        turns: In conversation order (file order).
        origins: Whose memory of the user this is, whole; what others brought stays as it is.
    """

    user: str
    facts: tuple[Fact, ...]
    turns: tuple[Turn, ...]
    origins: frozenset[str] = frozenset({""})


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    user: str
    origin: Annotated[str, Field(pattern=r"^([a-z0-9][-a-z0-9]{0,31})?$")] = ""


class _UserLine(_Line):
    kind: Literal["user"]


class _TextLine(_Line):
    id: Annotated[str, Field(min_length=1)]
    text: str
    time: str | None = None


class _TurnLine(_TextLine):
    kind: Literal["turn"]
    speaker: str


class _FactLine(_TextLine):
    kind: Literal["fact"]
    turn: str | None = None


_AnyLine = _UserLine | _TurnLine | _FactLine
_LINE: TypeAdapter[_AnyLine] = TypeAdapter(Annotated[_AnyLine, Field(discriminator="kind")])
_KINDS = 'Write "kind": "fact", "turn" or "user"'

# What to do about each kind of schema error; pydantic's own messages may quote the value.
_FIXES = {
    "missing": ("is missing", "Add it"),
    "extra_forbidden": ("is not a field of this kind of line", "Remove it or correct its name"),
    "string_type": ("is not a string", "Write it as a JSON string"),
    "string_too_short": ("is empty", "Give it a value"),
    "union_tag_not_found": ("is missing", _KINDS),
    "union_tag_invalid": ("is unknown", _KINDS),
    "string_pattern_mismatch": ("has other signs than a-z, 0-9 and -", "Write a tool's name"),
}


@dataclass(slots=True)
class _Builder:
    """What has been read of one user so far."""

    facts: dict[str, Fact] = field(default_factory=dict)
    turns: dict[str, Turn] = field(default_factory=dict)
    # Source and line of each fact.
    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    origins: set[str] = field(default_factory=set)


class InputParser:
    """Checks lines of one or more inputs that together are the users' whole memory."""

    def __init__(self) -> None:
        self._users: dict[str, _Builder] = {}

    def add(self, lines: Iterable[bytes], source: str) -> None:
        """Checks the lines of one input.

        Args:
            lines: Raw lines, with or without their line ends. Blank lines are skipped.
            source: Name for error messages.

        Raises:
            InputError: A line is wrong.
        """
        for number, raw in enumerate(lines, start=1):
            # Editors on Windows put a byte order mark before the first line; it means nothing.
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not raw.strip():
                continue
            parsed = _parse(raw, source, number)
            _check_user(parsed.user, source, number)
            _check_origin(parsed.origin, source, number)
            builder = self._users.setdefault(parsed.user, _Builder())
            builder.origins.add(parsed.origin)
            if isinstance(parsed, _TurnLine):
                _add_turn(builder, parsed, source, number)
            elif isinstance(parsed, _FactLine):
                _add_fact(builder, parsed, source, number)

    def finish(self) -> dict[str, UserInput]:
        """Returns user id -> input, in the order in which users first appear.

        Raises:
            InputError: A fact names a turn that does not exist.
        """
        # References are checked last: a fact may stand before its turn, or in another file.
        for builder in self._users.values():
            for fact in builder.facts.values():
                if fact.turn_id is not None and fact.turn_id not in builder.turns:
                    source, line = builder.places[fact.id]
                    problem = "names a turn that this user does not have"
                    fix = "Add the turn's line for the same user, or remove the field"
                    raise InputError(source, line, "turn", problem, fix)
        return {
            user: UserInput(
                user, tuple(b.facts.values()), tuple(b.turns.values()), frozenset(b.origins)
            )
            for user, b in self._users.items()
        }


def read_inputs(
    names: Sequence[str], *, authorization_file: str | None = None, max_bytes: int
) -> dict[str, UserInput]:
    """Reads and checks the whole input.

    Args:
        names: Files, folders, URLs, or ``"-"`` for standard input.
        authorization_file: File with the HTTP ``Authorization`` header.
        max_bytes: Most bytes of all inputs together, unpacked.

    Returns:
        User id -> that user's input, in the order in which users first appear.

    Raises:
        InputError: A line is wrong, or an input cannot be read.
        SourceError: An input could not be fetched whole.
        ConfigError: The authorization file cannot be used.
    """
    authorization = None
    if authorization_file:
        if not any(is_http(name) for name in names):
            raise ConfigError(
                f"--input-authorization-file '{authorization_file}': no --input is an http:// or "
                "https:// URL; leave it out"
            )
        authorization = read_authorization(authorization_file)
    parser, limit = InputParser(), ByteLimit(max_bytes)
    for name in expand(names):
        source = shown(name)
        with open_source(name, authorization, limit) as stream:
            try:
                parser.add(read_lines(stream, source, limit), source)
            except OSError as error:
                problem = f"cannot be read: {error.strerror or type(error).__name__}"
                fix = "Check the path and its permissions"
                raise InputError(source, 0, "", problem, fix) from None
    return parser.finish()


def parse_lines(lines: Iterable[bytes], source: str) -> dict[str, UserInput]:
    """Checks lines that are already in hand; see `InputParser`."""
    parser = InputParser()
    parser.add(lines, source)
    return parser.finish()


def _parse(raw: bytes, source: str, number: int) -> _AnyLine:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} of the line is not valid UTF-8"
        raise InputError(source, number, "", problem, _ENCODING_FIX) from None
    except json.JSONDecodeError as error:
        problem = f"is not valid JSON at column {error.colno}: {error.msg}"
        raise InputError(source, number, "", problem, "Write one JSON object a line") from None
    except _RepeatedKeyError as error:
        fix = "Write each field once"
        raise InputError(source, number, str(error), "is repeated", fix) from None
    except (RecursionError, ValueError):
        problem = "is not usable JSON"
        raise InputError(source, number, "", problem, "Write one flat JSON object a line") from None
    if not isinstance(value, dict):
        raise InputError(source, number, "", "is not an object", "Write one JSON object a line")
    try:
        parsed = _LINE.validate_python(value)
    except ValidationError as error:
        raise _schema_error(error, source, number) from None
    for name, text in parsed.model_dump().items():
        # JSON can spell half of a surrogate pair; it could not be written to the store later.
        if isinstance(text, str) and not _is_utf8(text):
            problem = "contains half of a surrogate pair"
            raise InputError(source, number, name, problem, _ENCODING_FIX)
    return parsed


class _RepeatedKeyError(Exception):
    """An object has the same key twice; JSON readers disagree on which one counts."""


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise _RepeatedKeyError(_field_name(key))
        result[key] = value
    return result


def _schema_error(error: ValidationError, source: str, number: int) -> InputError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind = first["type"]
    # The location starts with the kind of line, except when the kind itself is what is wrong.
    name = "kind" if kind.startswith("union_tag") else str(first["loc"][-1])
    problem, fix = _FIXES.get(kind, ("has a wrong value", "See docs/input-format.md"))
    return InputError(source, number, _field_name(name), problem, fix)


def _field_name(name: str) -> str:
    """Keeps a field's name printable: with misplaced quotes a fact can become a key."""
    return name if name.isidentifier() and len(name) <= 32 else "?"


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_origin(origin: str, source: str, number: int) -> None:
    if origin == API:
        problem = "is 'api', which the memory API alone may write"
        raise InputError(source, number, "origin", problem, "Leave the field out")


def _check_user(user: str, source: str, number: int) -> None:
    if not user.strip():
        raise InputError(source, number, "user", "is empty", "Give the user's id")
    if len(user.encode("utf-8")) > MAX_USER_BYTES:
        problem = f"is longer than {MAX_USER_BYTES} bytes"
        raise InputError(source, number, "user", problem, "Use a shorter id")
    if "\0" in user:
        raise InputError(source, number, "user", "contains a NUL character", "Remove it")


def _add_turn(builder: _Builder, line: _TurnLine, source: str, number: int) -> None:
    turn = Turn(line.id, line.speaker, line.text, line.time, line.origin)
    if builder.turns.setdefault(turn.id, turn) != turn:
        problem = "repeats an earlier turn's id with other content"
        raise InputError(source, number, "id", problem, "Give each turn of a user its own id")


def _add_fact(builder: _Builder, line: _FactLine, source: str, number: int) -> None:
    # A fact is one line of the prompt, so line breaks inside it would look like two facts.
    text = " ".join(line.text.split())
    if not text:
        raise InputError(source, number, "text", "is empty", "Write the fact or remove the line")
    if len(text) > MAX_FACT_CHARS:
        problem = f"is longer than {MAX_FACT_CHARS} characters"
        raise InputError(source, number, "text", problem, "Split it into several facts")
    fact = Fact(line.id, text, line.turn, line.time, line.origin)
    if builder.facts.setdefault(fact.id, fact) != fact:
        problem = "repeats an earlier fact's id with other content"
        raise InputError(source, number, "id", problem, "Give each fact of a user its own id")
    builder.places.setdefault(fact.id, (source, number))
