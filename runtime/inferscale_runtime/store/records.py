"""What a store holds for one user, as plain immutable records (no I/O, no torch).

A fact is one short memory text; a turn is one message of the conversation it came from. A segment
is the stored KV of one fact under one fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the source conversation, in conversation order.

    Attributes:
        id: Unique within the user.
        speaker: Who said it, ``""`` when unknown.
        text: The message.
        time: Free-form time text, or None.
        origin: Who brought it, as of a fact.
    """

    id: str
    speaker: str
    text: str
    time: str | None = None
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """One memory text.

    Attributes:
        id: Unique within the user.
        text: The fact, one line.
        turn_id: The source turn, or None.
        time: Free-form time text, or None; it is not part of the prompt.
        origin: Who brought it and may replace it: ``""`` an encode input, ``"api"`` the memory API,
            else the name of an importer.
        created_at: UTC time in ISO 8601 of the first write, None for an encode input.
        updated_at: As ``created_at``, of the last change.
    """

    id: str
    text: str
    turn_id: str | None = None
    time: str | None = None
    origin: str = ""
    created_at: str | None = None
    updated_at: str | None = None


@dataclass(frozen=True, slots=True, order=True)
class Tombstone:
    """What a source must not bring back, because it was deleted or replaced by somebody else.

    Attributes:
        kind: ``"fact"`` or ``"turn"``.
        origin: Of the source that is held off.
        digest: Hex SHA-256 of user id, NUL and the id, so that the id itself is gone.
    """

    kind: str
    origin: str
    digest: str


def tombstone(kind: str, origin: str, user: str, identity: str) -> Tombstone:
    """Makes the tombstone of one fact or turn."""
    digest = hashlib.sha256(f"{user}\0{identity}".encode()).hexdigest()
    return Tombstone(kind, origin, digest)


@dataclass(frozen=True, slots=True)
class Segment:
    """The index entry of one fact's stored KV.

    Attributes:
        fact_id: The fact.
        key: Hex hash of everything these bytes depend on (fact tokens, ids and tokens of the
            context, fingerprint).
        token_ids: The fact's prompt tokens, ``num_tokens`` long.
        context_fact_ids: Facts that were read before it while encoding.
        context_turn_ids: Turns that were read before it while encoding.
        file: Data file, relative to the user's folder.
        row: First row in that file's ``kv`` tensor.
        crc32: CRC-32 of the segment's bytes (little-endian, C order).
    """

    fact_id: str
    key: str
    token_ids: tuple[int, ...]
    context_fact_ids: tuple[str, ...]
    context_turn_ids: tuple[str, ...]
    file: str
    row: int
    crc32: int

    @property
    def num_tokens(self) -> int:
        """Rows of KV, equal to the number of tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class UserMemory:
    """Everything of one user at one version.

    Attributes:
        user: The user id as the client writes it.
        version: Version of the manifest, 0 before the first commit, then +1 a commit.
        facts: In the order in which they were learnt.
        turns: In conversation order.
        embedder: Name of the model that made ``embeddings``, ``""`` when there are none.
        embeddings: ``[num_facts, dim]`` float32, unit length, row i belongs to ``facts[i]``.
        encodings: Fingerprint hex digest -> fact id -> segment.
        epoch: Another one after each deletion or change; set by the writer.
        tombstones: What sources must not bring back.
    """

    user: str
    version: int
    facts: tuple[Fact, ...]
    turns: tuple[Turn, ...]
    embedder: str
    embeddings: npt.NDArray[np.float32]
    encodings: Mapping[str, Mapping[str, Segment]] = field(default_factory=dict)
    epoch: int = 0
    tombstones: frozenset[Tombstone] = frozenset()
