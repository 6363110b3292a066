"""A folder that follows a tool: one file of input lines for each user, and the state beside them.

The folder is an input of ``inferscale encode``: what does not end in ``.jsonl``, or begins with a
dot, is passed over there. A user's file is replaced whole, so a killed import leaves each user as
before or as now. The state is written after the files that it speaks of: what it does not know of
yet is read again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.importing.records import Line, ToolMemory, from_lines, to_lines

STATE = ".inferscale-import.json"
LOCK = ".inferscale-import.lock"


class UserState(BaseModel):
    """What is known of one user's file.

    Attributes:
        marker: The tool's marker when it was read.
        gone: The tool does not list the user any more; the file says that nothing is left.
    """

    model_config = ConfigDict(extra="forbid")

    marker: str | None = None
    gone: bool = False


class State(BaseModel):
    """The state of a folder.

    Attributes:
        version: Of this document.
        origin: The tool.
        source: Where it is, and the options.
        users: By id.
        reading: Users that the unfinished reading has read already; empty when there is none.
        reading_since: When it began, seconds since 1970.
    """

    model_config = ConfigDict(extra="forbid")

    version: int = 1
    origin: str
    source: str
    users: dict[str, UserState] = {}
    reading: list[str] = []
    reading_since: float = 0.0


class ImportFolder:
    """The files of one import.

    Args:
        path: The folder; made when it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other imports out of the folder.

        Raises:
            ConfigError: Another one is at work, or the folder cannot be written.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            stream = open(self._path / LOCK, "a+b")
        except OSError as error:
            raise self._unwritable(error) from None
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"--out '{self._path}': another import is writing there; wait for its end"
                ) from None
            yield

    def read_state(self, origin: str, source: str) -> State:
        """Reads the state, or begins a new one in a folder without files.

        Raises:
            ConfigError: The folder holds another import, or something else.
        """
        try:
            text = (self._path / STATE).read_text(encoding="utf-8")
        except FileNotFoundError:
            if self._path.is_dir() and any(self._path.glob("*.jsonl")):
                raise ConfigError(
                    f"--out '{self._path}': it holds *.jsonl files that no import made; name "
                    "another folder"
                ) from None
            return State(origin=origin, source=source)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"--out '{self._path}': {STATE}: {reason}") from None
        try:
            state = State.model_validate_json(text)
        except ValidationError:
            raise ConfigError(
                f"--out '{self._path}': {STATE} is damaged or of another release; delete the "
                "folder, and everything is read again"
            ) from None
        if (state.origin, state.source) != (origin, source):
            raise ConfigError(
                f"--out '{self._path}': it follows {state.origin} at {state.source}, not {origin} "
                f"at {source}; name another folder"
            )
        return state

    def write_state(self, state: State) -> None:
        """Replaces the state."""
        self._replace(STATE, state.model_dump_json().encode())

    def read(self, user: str) -> ToolMemory | None:
        """What a user's file says, or None where there is no whole one."""
        try:
            text = (self._path / _name(user)).read_text(encoding="utf-8")
            return from_lines(json.loads(line) for line in text.split("\n") if line)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, user: str, origin: str, memory: ToolMemory) -> None:
        """Replaces a user's file."""
        self._replace(_name(user), encode_lines(to_lines(user, origin, memory)))

    def _replace(self, name: str, data: bytes) -> None:
        try:
            handle, temporary = tempfile.mkstemp(dir=self._path, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(temporary, self._path / name)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"--out '{self._path}': {error.strerror or type(error).__name__}; name a folder that "
            "can be written"
        )


def encode_lines(lines: list[Line]) -> bytes:
    """JSON Lines."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def _name(user: str) -> str:
    """User ids may hold anything, so a file is called by a digest."""
    digest = hashlib.sha256(user.encode("utf-8", "replace")).hexdigest()
    return f"{digest[:32]}.jsonl"
