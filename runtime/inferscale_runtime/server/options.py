"""The ``memory`` object of a chat request, and what the answer says about it (pure)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator

Mode = Literal["injected", "text"]


class MemoryOptions(BaseModel):
    """Which memory a chat request uses."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    user: StrictStr = Field(min_length=1, max_length=512)
    """Whose memory."""
    store: StrictStr | None = Field(None, min_length=1, max_length=253)
    """Which store; the first that has the user when absent."""
    k: StrictInt | None = Field(None, ge=0, le=1000)
    """How many facts; the server's default when absent."""
    mode: Mode = "injected"
    """``injected`` writes stored KV; ``text`` prefills the very same tokens."""
    link_tail: StrictInt | None = Field(None, ge=0, le=1000)
    """How many of the best facts are prefilled over the injected rest."""
    order: Literal["relevance", "stored"] | None = None
    """Order of the facts in the prompt."""
    session: StrictStr | None = Field(None, min_length=1, max_length=128)
    """Name of the chat, unique within the user: its facts stay where they are from turn to turn."""
    explain: StrictBool = False
    """``usage.memory`` names the facts that were used."""

    @field_validator("user")
    @classmethod
    def _no_nul(cls, value: str) -> str:
        if "\x00" in value or len(value.encode("utf-8", "surrogatepass")) > 512:
            raise ValueError("must be at most 512 bytes of UTF-8 without NUL")
        value.encode()  # lone surrogates
        return value


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """``usage.memory`` of an answer.

    Attributes:
        mode: ``injected``, ``text``, or ``none`` when there was nothing to remember.
        facts: Facts in the prompt.
        injected_tokens: Prompt tokens whose KV was injected, preamble included.
        text_tokens: Tokens of facts that were prefilled.
        tier: Where the KV was when the request came: ``dram``, ``disk``, or None.
        store_version: Version of the user's manifest, 0 for an unknown user.
        reason: Why something asked for was not injected, or None.
        store: Name of the store that the memory came from, or None when no store has the user.
        session: ``started``, ``continued`` or ``restarted``; None when no session is kept.
        new_facts: Facts that this turn added to its session.
        fact_ids: Ids of the facts in the prompt, in its order.
        explain: The answer names them.
    """

    mode: Literal["injected", "text", "none"]
    facts: int = 0
    injected_tokens: int = 0
    text_tokens: int = 0
    tier: Literal["dram", "disk"] | None = None
    store_version: int = 0
    reason: str | None = None
    store: str | None = None
    session: Literal["started", "continued", "restarted"] | None = None
    new_facts: int = 0
    fact_ids: tuple[str, ...] = ()
    explain: bool = False

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        fields = asdict(self)
        if not fields.pop("explain"):
            del fields["fact_ids"]
        return fields
