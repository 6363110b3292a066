"""Kinds of sources: where the facts of a MemoryStore come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from inferscale_operator.api.base import NO_PARENT_FOLDER, ObjectName, SecretKeyRef
from inferscale_operator.api.rules import Rule, Struct

URL_PATTERN = r"^https?://[^\s@?#]+$"
USERS_PATTERN = r"^(identity|agent|tag:\S{1,200})$"
LABEL_PATTERN = r"^[^\s,=]+$"


class ConfigMapSource(Struct):
    """Facts in a ConfigMap: for samples and small memories. A change is encoded within a minute."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: str | None = Field(None, min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")
    """Key with the JSON Lines. Absent: every key that ends in ``.jsonl``, in order of name."""


class PvcSource(Struct):
    """Facts in a file or folder of an existing claim."""

    claim_name: ObjectName
    """PersistentVolumeClaim; mounted read-only."""
    path: Annotated[str, NO_PARENT_FOLDER] = Field(
        "", max_length=1024, pattern=r"^([^/.\s][^\s]*)?$"
    )
    """File, or folder of ``*.jsonl`` files, inside the claim; the claim's root when empty."""


class HttpSource(Struct):
    """Facts behind an HTTP(S) address."""

    url: str = Field(max_length=2048, pattern=r"^https?://[^\s@]+$")
    """Address of one JSON Lines document. Credentials go into the Secret, not here."""
    authorization_secret_ref: SecretKeyRef | None = None
    """Value of the ``Authorization`` header."""


class _ToolSource(Struct):
    token_secret_ref: SecretKeyRef | None = None
    """API key; none is sent when absent."""
    allow_empty: bool = False
    """True lets a tool that lists no user at all delete everything that came from it; else that is
    an error, because an API key of another project looks the same."""


class Mem0Source(_ToolSource):
    """Facts in Mem0, read by HTTP."""

    rules = (
        Rule(
            cel="!self.turns || self.api == 'platform'",
            message="turns is for api platform; Mem0's own server keeps no messages",
            holds=lambda self: not self.turns or self.api == "platform",
        ),
    )

    url: str = Field(max_length=2048, pattern=URL_PATTERN)
    """Address of Mem0's server, or ``https://api.mem0.ai``."""
    api: Literal["server", "platform"] = "server"
    """``server`` is the one of the open-source library, ``platform`` the hosted product."""
    turns: bool = False
    """Whether the messages that a memory was made from are read too."""


class ZepSource(_ToolSource):
    """Facts in Zep."""

    url: str = Field("https://api.getzep.com", max_length=2048, pattern=URL_PATTERN)
    """Address of Zep."""
    turns: bool = False
    """Whether episodes are read as the facts' source turns."""


class LettaSource(_ToolSource):
    """Memory blocks and archival passages of Letta's agents."""

    url: str = Field("https://api.letta.com", max_length=2048, pattern=URL_PATTERN)
    """Address of Letta."""
    users_from: str = Field("identity", max_length=256, pattern=USERS_PATTERN)
    """Whose an agent is: ``identity`` (its one identity of type user), ``tag:PREFIX`` (the rest of
    its one tag that starts so), or ``agent`` (each agent is a user)."""
    blocks: list[Annotated[str, Field(min_length=1, max_length=128, pattern=LABEL_PATTERN)]] = (
        Field(default_factory=lambda: ["human"], max_length=32)
    )
    """Labels of the memory blocks that are read, beside all archival passages."""


class ApiSource(Struct):
    """No input: facts are written through the memory API of the servers, which may write the store.

    A new fact goes as text until a job has encoded it.
    """

    pending_seconds: int = Field(300, ge=10, le=86_400)
    """How long facts wait for their KV before a job is started for them."""
    pending_facts: int = Field(256, ge=1, le=1_000_000)
    """So many waiting facts start a job at once."""
