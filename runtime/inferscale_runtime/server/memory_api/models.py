"""Bodies of the memory API; the OpenAPI document is made from them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr

from inferscale_runtime.store.manifest import MAX_FACT_CHARS

MAX_ID_BYTES = 512
MAX_BATCH = 1000
MAX_TIME_CHARS = 128


def check_id(value: str) -> str:
    """Refuses what can be no id of a fact, a turn or a user."""
    if "\x00" in value or len(value.encode()) > MAX_ID_BYTES:
        raise ValueError(f"must be at most {MAX_ID_BYTES} bytes of UTF-8 without NUL")
    return value


def one_line(value: str) -> str:
    """A fact is one line of the prompt: line breaks inside it would look like two facts."""
    text = " ".join(value.split())
    if not text or "\x00" in text:
        raise ValueError("must be text without NUL, and not blank")
    return text


Id = Annotated[StrictStr, Field(min_length=1, max_length=MAX_ID_BYTES), AfterValidator(check_id)]
Text = Annotated[
    StrictStr, Field(min_length=1, max_length=MAX_FACT_CHARS), AfterValidator(one_line)
]
Time = Annotated[
    StrictStr, Field(min_length=1, max_length=MAX_TIME_CHARS), AfterValidator(one_line)
]


class _In(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class _Out(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class FactContent(_In):
    """What is written of one fact."""

    text: Text
    """The fact; white space is made single spaces."""
    time: Time | None = None
    """When it was said or became true, in any form."""
    turn_id: Id | None = None
    """The turn that it came from; the user must have it."""


class FactIn(FactContent):
    """A fact of a batch."""

    id: Id | None = None
    """Its id, unique within the user; made by the server when absent."""


class FactBatch(_In):
    """Facts to write; all of them or none."""

    facts: list[FactIn] = Field(min_length=1, max_length=MAX_BATCH)
    """In the order in which they were learnt."""


class Search(_In):
    """A search over one user's facts."""

    query: Annotated[StrictStr, Field(min_length=1, max_length=MAX_FACT_CHARS)]
    """A question or a text."""
    k: StrictInt = Field(10, ge=1, le=1000)
    """Most results."""


class Fact(_Out):
    """One stored fact."""

    id: str
    text: str
    time: str | None
    turn_id: str | None
    origin: str
    """``api``, the name of an importer, or empty for an encode input."""
    created_at: str | None
    """When the store first had it, ISO 8601 in UTC."""
    updated_at: str | None
    """When its text last changed."""
    injectable: bool
    """Its KV is in the store; otherwise it goes into prompts as text until it is encoded."""


class FactList(_Out):
    """A page of a user's facts."""

    facts: list[Fact]
    next: str | None
    """Value of ``after`` for the next page; null on the last one."""
    version: int
    """Version of the user's memory."""


class ScoredFact(Fact):
    """A search result."""

    score: float
    """Inner product of the embeddings."""


class SearchResult(_Out):
    """Search results, the best first."""

    facts: list[ScoredFact]
    version: int
    """Version of the user's memory."""


class Written(_Out):
    """What a write did."""

    created: list[str]
    """Ids of new facts."""
    updated: list[str]
    """Ids of facts that have changed."""
    unchanged: list[str]
    """Ids of facts that were like that before."""
    version: int
    """Version of the user's memory now."""


class Deleted(_Out):
    """What a deletion did."""

    deleted: list[str]
    """Ids of facts that are gone."""
    missing: list[str]
    """Ids of facts that were not there."""
    invalidated: int
    """Encodings of other facts that were taken out because they had a deleted one in context."""
    version: int
    """Version of the user's memory now."""


class ErasureReceipt(_Out):
    """What was erased of a user."""

    files: int
    """Files that were deleted."""
    bytes: int
    """Their size."""
    digests: list[str]
    """SHA-256 of each of them."""
    arena_bytes: int
    """Bytes that this server held in memory."""


class Answer(_Out):
    """How memory was used in one answer."""

    time: str
    """When the request came, ISO 8601 in UTC."""
    mode: str
    """``injected``, ``text`` or ``none``."""
    ttft_seconds: float | None
    """From the request to the first token; null when the answer was not streamed."""
    seconds: float | None
    """From the request to the end of the answer; null while it goes on."""
    injected_tokens: int
    text_tokens: int
    reason: str | None
    """Why not all was injected."""
    fact_ids: list[str]
    """Facts that were in the prompt, in its order."""


class AnswerList(_Out):
    """The last answers of this replica that used a user's memory, the newest first."""

    answers: list[Answer]


class ErrorBody(_Out):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: int
    """The HTTP status."""


class Error(_Out):
    """An error in OpenAI's form."""

    error: ErrorBody


def error_responses(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of a route, for its OpenAPI document."""
    always = (400, 401, 403, 404, 413, 429, 503)
    return {code: {"model": Error} for code in sorted({*always, *codes})}
