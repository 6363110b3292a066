"""API keys from a file, which is read again when it changes.

The file holds one key alone on its line, or a JSON document with several::

    {"keys": [{"key": "...", "name": "backend", "users": ["*"], "permissions": ["chat"]},
              {"sha256": "...", "name": "team-a", "users": ["team-a/*"]}]}
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.server.auth.principal import (
    ALL_PERMISSIONS,
    Principal,
    split_patterns,
)

logger = logging.getLogger("vllm.inferscale.auth")

LOOK_SECONDS = 1.0
"""How often the file is looked at (arbitrary)."""
MAX_FILE_BYTES = 4 << 20
LEAST_KEY_CHARS = 16
"""Shorter keys could be guessed (arbitrary)."""

_Pattern = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class _Key(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    key: Annotated[str, Field(min_length=LEAST_KEY_CHARS, max_length=4096)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] | None = None
    users: Annotated[tuple[_Pattern, ...], Field(min_length=1, max_length=10_000)] = ("*",)
    permissions: Annotated[
        tuple[Literal["chat", "read", "write", "admin"], ...], Field(min_length=1)
    ] = ("chat", "read", "write")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either 'key' or 'sha256'")
        return self


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys: Annotated[tuple[_Key, ...], Field(min_length=1, max_length=10_000)]


def parse_keys(data: bytes, source: str) -> list[tuple[bytes, Principal]]:
    """Reads a key file.

    Args:
        data: Its content.
        source: Its name, for the error message.

    Returns:
        SHA-256 of each key, and who it is.

    Raises:
        ConfigError: Naming the field, never a key.
    """
    if data.lstrip()[:1] == b"{":
        return _parse_document(data, source)
    try:
        key = data.decode("ascii").strip()
    except UnicodeDecodeError:
        key = ""
    if len(key) < LEAST_KEY_CHARS or not key.isprintable() or " " in key:
        raise ConfigError(
            f"key file '{source}': it must hold one key of at least {LEAST_KEY_CHARS} printable "
            "ASCII characters, or a JSON document with 'keys'"
        )
    sha256 = hashlib.sha256(key.encode()).digest()
    principal = Principal(f"key-{sha256.hex()[:12]}", ALL_PERMISSIONS, prefixes=("",))
    return [(sha256, principal)]


def _parse_document(data: bytes, source: str) -> list[tuple[bytes, Principal]]:
    try:
        document = _Document.model_validate(json.loads(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "document"
        raise ConfigError(f"key file '{source}': field '{field}': {first['msg']}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"key file '{source}': it is no JSON document") from None
    found: list[tuple[bytes, Principal]] = []
    for n, entry in enumerate(document.keys):
        if entry.key is not None:
            sha256 = hashlib.sha256(entry.key.encode("utf-8", "surrogatepass")).digest()
        else:
            sha256 = bytes.fromhex(entry.sha256 or "")
        if any(sha256 == other for other, _ in found):
            raise ConfigError(f"key file '{source}': field 'keys.{n}': the key is given twice")
        users, prefixes = split_patterns(entry.users)
        name = f"key-{sha256.hex()[:12]}" + (f"/{entry.name}" if entry.name else "")
        found.append((sha256, Principal(name, frozenset(entry.permissions), users, prefixes)))
    return found


class KeyRing:
    """The keys of a file.

    Args:
        path: The file; a Secret's volume may replace it while the server runs.
        clock: Seconds, monotonic.

    Raises:
        ConfigError: When the file cannot be read or is wrong at the start. Later the keys stay as
            they were, and a warning says so.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        self._seen = self._stamp()
        self._keys = self._read()
        self._next_look = clock() + LOOK_SECONDS

    def authenticate(self, key: str) -> Principal | None:
        """Who a key belongs to, or None; takes the same time wherever the key stands."""
        self._look()
        presented = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        found: Principal | None = None
        for sha256, principal in self._keys:
            if hmac.compare_digest(sha256, presented):
                found = principal
        return found

    def _look(self) -> None:
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._keys = self._read()
        except ConfigError as error:
            logger.warning("%s; the keys stay as they were", error)
        else:
            logger.info("key file '%s' was read again: %d keys", self._path, len(self._keys))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _read(self) -> list[tuple[bytes, Principal]]:
        try:
            with open(self._path, "rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"key file '{self._path}': {error.strerror}") from None
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"key file '{self._path}': larger than {MAX_FILE_BYTES} bytes")
        return parse_keys(data, str(self._path))
