"""The store's JSON files, their names and the limits of the format."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from inferscale_runtime.errors import ConfigError, DamagedStoreError, StoreFormatError

FORMAT = "inferscale-store"
FORMAT_VERSION = 2
MARKER = "inferscale-store.json"
MANIFEST = "manifest.json"
LOCK = ".lock"
PREAMBLES = "preambles"
USERS = "users"

MAX_USER_BYTES = 512
MAX_FACT_CHARS = 8192
MAX_FACTS = 1_000_000
MAX_MANIFEST_BYTES = 64 << 20

KV_NAME = re.compile(r"kv-[0-9a-f]{32}\.safetensors")
_FINGERPRINT = re.compile(r"[0-9a-f]{16,128}")
_FILE_NAME = r"^[0-9a-z-]{1,200}\.(parquet|safetensors)$"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def upgraded(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Takes a record of an older format to this one."""
        return body


_M = TypeVar("_M", bound=_Model)


class FileRef(_Model):
    """One immutable data file.

    Attributes:
        name: File name in the folder of the JSON file that refers to it.
        sha256: Hex digest of its bytes.
        bytes: Its length.
        rows: Rows of the table, or of the ``kv`` tensor.
    """

    name: Annotated[str, Field(pattern=_FILE_NAME)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0)]
    rows: Annotated[int, Field(ge=0)]


class Manifest(_Model):
    """One version of one user.

    Attributes:
        user: The user id.
        version: 1 after the first commit, then +1 a commit.
        epoch: Drawn at the first commit, +1 with each that deleted or changed a fact or turn.
        embedder: Model of the embeddings, ``""`` when there are none.
        facts: Tables of the facts; one after another they are all facts in order.
        turns: Table of the turns.
        tombstones: Table of what sources must not bring back, None without any.
        encodings: Fingerprint -> table of its segments.
        kv: Data files of the segments, by name.
    """

    user: str
    version: Annotated[int, Field(ge=1)]
    epoch: Annotated[int, Field(ge=0)]
    embedder: str
    facts: tuple[FileRef, ...]
    turns: FileRef
    tombstones: FileRef | None
    encodings: dict[str, FileRef]
    kv: tuple[FileRef, ...]

    @classmethod
    def upgraded(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Takes a record of version 1 to version 2."""
        if "epoch" in body:
            return body
        return {**body, "facts": [body["facts"]], "epoch": 0, "tombstones": None}

    @property
    def num_facts(self) -> int:
        """Facts of the user."""
        return sum(ref.rows for ref in self.facts)

    def refs(self) -> list[FileRef]:
        """Returns every file that this version needs."""
        rest = [self.tombstones] if self.tombstones else []
        return [*self.facts, self.turns, *rest, *self.encodings.values(), *self.kv]


class Preamble(_Model):
    """The record of one fingerprint.

    Attributes:
        fingerprint: Its hex digest.
        fields: What the digest was made from, for people.
        token_ids: The preamble's tokens.
        data: The file with the preamble's KV.
    """

    fingerprint: str
    fields: dict[str, JsonValue]
    token_ids: tuple[int, ...]
    data: FileRef


def _canonical(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(
        body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def seal(model: BaseModel) -> bytes:
    """Returns a record as canonical JSON with the SHA-256 of the rest of it.

    Raises:
        ConfigError: If a value has no JSON form or the text would be too large.
    """
    body = model.model_dump(mode="python")
    try:
        body["sha256"] = hashlib.sha256(_canonical(body)).hexdigest()
        data = _canonical(body)
    except ValueError as exc:
        raise ConfigError(f"the store cannot keep this value as JSON: {exc}. Change it") from exc
    if len(data) > MAX_MANIFEST_BYTES:
        raise ConfigError(
            f"the manifest would take {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}. "
            "Remove encodings of fingerprints that are no longer used"
        )
    return data


def unseal(data: bytes, model: type[_M], path: str) -> _M:
    """Returns the record that :func:`seal` wrote.

    Raises:
        DamagedStoreError: If any byte of it changed.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise DamagedStoreError(path, f"it is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        body = json.loads(data)
        digest = body.pop("sha256")
        rest = _canonical(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise DamagedStoreError(path, "it is not the JSON that was written") from exc
    if hashlib.sha256(rest).hexdigest() != digest:
        raise DamagedStoreError(path, "its sha256 does not match")
    try:
        upgraded = model.upgraded(body)
        return model.model_validate_json(rest if upgraded is body else _canonical(upgraded))
    except KeyError as exc:
        raise DamagedStoreError(path, f"it has no field {exc}") from exc
    except ValidationError as exc:
        where = ".".join(str(part) for part in exc.errors()[0]["loc"])
        raise DamagedStoreError(path, f"field '{where}' is not valid") from exc


def marker() -> bytes:
    """Returns the bytes of the file that makes a folder a store."""
    return _canonical({"format": FORMAT, "version": FORMAT_VERSION})


def check_marker(data: bytes, url: str) -> int:
    """Refuses what is no store of a version that this release reads; returns the version.

    Raises:
        StoreFormatError: With what was found.
    """
    try:
        body = json.loads(data)
        name, version = body["format"], body["version"]
    except (ValueError, KeyError, TypeError) as exc:
        raise StoreFormatError(
            f"'{url}' is no store: {MARKER} is not readable. Restore that file or make a new store"
        ) from exc
    if name != FORMAT or type(version) is not int or version < 1:
        raise StoreFormatError(f"'{url}' is no store: {MARKER} names format {name!r} {version!r}")
    if version > FORMAT_VERSION:
        raise StoreFormatError(
            f"store '{url}' has version {version}, this release reads up to {FORMAT_VERSION}. "
            "Upgrade inferscale"
        )
    return version


def user_folder(user: str) -> str:
    """Returns the folder of a user; the id is hashed because it may hold any character.

    Raises:
        ConfigError: If the id is empty, too long or holds NUL.
    """
    try:
        data = user.encode()
    except UnicodeEncodeError as exc:
        raise ConfigError("user id is not valid Unicode. Use another id") from exc
    if not 1 <= len(data) <= MAX_USER_BYTES or 0 in data:
        raise ConfigError(
            f"user id has {len(data)} bytes; it must have 1 to {MAX_USER_BYTES} and no NUL. "
            "Use another id"
        )
    return f"{USERS}/{hashlib.sha256(data).hexdigest()[:32]}"


def check_fingerprint(fingerprint: str) -> str:
    """Returns the fingerprint; it becomes part of file names, so nothing but hex is allowed.

    Raises:
        ConfigError: If it is anything else.
    """
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ConfigError(f"fingerprint {fingerprint!r} is not 16 to 128 lower-case hex digits")
    return fingerprint
