"""Settings of the runtime: one pydantic model for the CLI, the server and (later) the operator.

Pure: no torch, no vLLM, no environment. Unknown fields are refused, because one release renders and
reads this document. The server passes it to both plugins inside ``kv_connector_extra_config``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from inferscale_runtime.errors import ConfigError

DEFAULT_HEADING = (
    "You are a helpful assistant who remembers the user. What you know about the user:\n"
)
DEFAULT_FOOTER = "\nUse these memories to answer. Be brief.\n"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PromptConfig(_Section):
    """The fixed texts around the facts; they make the preamble and are part of the fingerprint."""

    heading: str = Field(DEFAULT_HEADING, min_length=1, max_length=8192)
    """What stands before the first fact."""
    fact_format: str = Field("- {text}\n", max_length=256, pattern=r"^[\s\S]*\{text\}[\s\S]*$")
    """How one fact is written; ``{text}`` is the fact."""
    footer: str = Field(DEFAULT_FOOTER, max_length=8192)
    """What stands between the last fact and the client's own system text."""


class EncodingConfig(_Section):
    """How facts are read."""

    policy: str = Field("neighbours:10", max_length=64)
    """Context policy: ``none``, ``turns:w``, ``facts:m``, ``neighbours:m`` or ``all``."""
    embedder: str = Field("minilm", max_length=1024)
    """``minilm``, a local sentence-transformers folder, or ``openai:MODEL@URL``."""


class RetrievalConfig(_Section):
    """Which facts a request gets when its body does not say."""

    top_k: int = Field(20, ge=0, le=1000)
    """Facts per request."""
    link_tail: int = Field(0, ge=0, le=1000)
    """How many of the best facts are prefilled over the injected rest instead of being injected."""
    min_score: float | None = Field(None, ge=-1, le=1)
    """Facts below this inner product are left out; None keeps all."""
    order: Literal["relevance", "stored"] = "relevance"
    """``relevance`` puts the best fact last, ``stored`` keeps the order of learning."""
    embedder: str = Field("", max_length=1024)
    """Embedder of the questions. Empty: the one that the store was encoded with, unless that is an
    endpoint, which a store may not choose for the server; then ``encoding.embedder``."""
    embedder_api_key_file: str = Field("", max_length=4096)
    """File with the API key of an ``openai:`` embedder."""
    unknown_user: Literal["empty", "error"] = "empty"
    """What an unknown user means: no memory, or HTTP 404."""


class TierConfig(_Section):
    """Where KV is kept while it is served."""

    dram_bytes: int = Field(1 << 30, ge=1 << 20)
    """Size of the shared-memory arena in bytes; 1 GiB by default."""
    stage_timeout_ms: int = Field(2000, ge=0, le=600_000)
    """How long a request waits for its facts to be read from disk before they go as text."""
    max_step_bytes: int = Field(1 << 30, ge=1 << 20)
    """Most bytes injected in one scheduler step; further requests wait for the next step."""


class RuntimeConfig(_Section):
    """What ``inferscale encode`` and ``inferscale serve`` need beside vLLM's own flags."""

    store: str = Field("", max_length=4096)
    """Folder or fsspec URL of the store."""
    run_dir: str = Field("", max_length=4096)
    """Private folder of one server: arena, leases and capability secret. Set by ``serve``."""
    prompt: PromptConfig = PromptConfig()
    encoding: EncodingConfig = EncodingConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    tiers: TierConfig = TierConfig()


def load_config(text: str, source: str) -> RuntimeConfig:
    """Parses a JSON document into a config.

    Args:
        text: The document.
        source: Its name, for the error message.

    Raises:
        ConfigError: Naming the field and the value.
    """
    from pydantic import ValidationError

    try:
        return RuntimeConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "document"
        raise ConfigError(f"{source}: field '{field}': {first['msg']}") from None
