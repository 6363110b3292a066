"""Settings of the runtime: one pydantic model for the CLI, the server and (later) the operator.

Pure: no torch, no vLLM, no environment. Unknown fields are refused, because one release renders and
reads this document. The server passes it to both plugins inside ``kv_connector_extra_config``.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.packing.shape import KVDtype as KVDtype

DEFAULT_HEADING = (
    "You are a helpful assistant who remembers the user. What you know about the user:\n"
)
DEFAULT_FOOTER = "\nUse these memories to answer. Be brief.\n"
DEFAULT_STORE_NAME = "default"
MAX_PLANNED_STORES = 1024
MAX_STORES = 16
SigningAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]


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
    kv_dtype: KVDtype = "auto"
    """How KV is stored and kept in memory: ``auto`` as the model computes it, ``int8`` or ``fp8``
    quantised. Part of the fingerprint."""
    embedder: str = Field("minilm", max_length=1024)
    """``minilm``, a local sentence-transformers folder, or ``openai:MODEL@URL``."""
    max_input_bytes: int = Field(4 << 30, ge=1)
    """Largest input in bytes, all files together and unpacked; the whole of it is held in memory.
    4 GiB by default."""


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
    gpu_bytes: int = Field(0, ge=0)
    """Hot segments kept in GPU memory outside vLLM's share, in bytes per GPU; 0 keeps none."""
    plan_file: str = Field("", max_length=4096)
    """JSON file with the arena's budget and each store's floor, ceiling and tier, followed while
    the server runs; empty: the whole arena is shared by need."""
    stage_timeout_ms: int = Field(2000, ge=0, le=600_000)
    """How long a request waits for its facts to be read from disk before they go as text, while
    nothing is read; five times that in all while others are read before it."""
    max_step_bytes: int = Field(1 << 30, ge=1 << 20)
    """Most bytes injected in one scheduler step; further requests wait for the next step."""
    warm: bool = True
    """Read the most recently written users' segments into the arena before the server is ready."""
    warm_bytes: int | None = Field(None, ge=0)
    """Most bytes of the arena that are filled in advance; half of the arena when absent."""
    warm_timeout_ms: int = Field(300_000, ge=0, le=3_600_000)
    """How long the server waits for that before it is ready; reading goes on behind it."""


class QuotaConfig(_Section):
    """Limits that ``inferscale encode`` and the memory API keep; None means no limit."""

    max_facts_per_user: int | None = Field(None, ge=1)
    """Most facts of one user; a user above it is an error and nothing is written."""
    max_store_bytes: int | None = Field(None, ge=1)
    """Most bytes of all files of the store; looked at before each write."""


class RetentionConfig(_Section):
    """How long facts are kept."""

    max_age_days: int | None = Field(None, ge=1, le=36_500)
    """Facts and turns whose ``time`` is an ISO 8601 date older than this are dropped by the next
    ``inferscale encode``; those without such a date are kept. None keeps all."""


class StoreEntry(_Section):
    """One of several stores that a server uses."""

    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
    """Name in requests, status and metrics: a Kubernetes object name."""
    url: str = Field(min_length=1, max_length=4096)
    """Folder or fsspec URL."""
    expected_fingerprint: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """Only this encoding is used; whatever else the store holds is passed over. None uses any
    encoding that fits the model."""
    writable: bool = True
    """The memory API may write to it."""


class SessionConfig(_Section):
    """Chats that keep their facts; the state is in the server's memory only."""

    max_sessions: int = Field(10_000, ge=1, le=1_000_000)
    """Most sessions of one server; above it the one that was used least recently is forgotten."""
    max_sessions_per_user: int = Field(32, ge=1, le=1_000_000)
    """Most sessions of one user, so that nobody pushes out those of others."""
    ttl_seconds: int = Field(3600, ge=1, le=604_800)
    """How long a session that is not used is remembered; one hour by default."""
    new_facts: int = Field(5, ge=0, le=1000)
    """Most facts that one turn adds; they are read as text, so each costs time."""
    max_facts: int = Field(200, ge=1, le=10_000)
    """Most facts of a session; one that would have more begins anew."""
    note_heading: str = Field("What else you know about the user:\n", max_length=8192)
    """What stands before the facts that a turn adds."""


class JwtConfig(_Section):
    """How JSON Web Tokens are verified."""

    jwks_uri: str = Field("", max_length=4096, pattern=r"^(https?://[^\s@]+)?$")
    """Where the issuer's public keys are; redirects are not followed."""
    jwks_file: str = Field("", max_length=4096)
    """File with them instead; read again every five minutes, and when a key is unknown."""
    issuer: str = Field(min_length=1, max_length=1024)
    """``iss`` must equal it."""
    audience: tuple[str, ...] = Field(min_length=1, max_length=16)
    """``aud`` must name one of these."""
    algorithms: tuple[SigningAlgorithm, ...] = Field(("RS256", "ES256"), min_length=1)
    """Signatures that are accepted; symmetric ones and ``none`` never are."""
    user_claim: str = Field("sub", min_length=1, max_length=256)
    """Claim with the id of the one user whose memory the token opens."""
    scope_claim: str = Field("", max_length=256)
    """Claim with permissions (``inferscale:chat``, ``:read``, ``:write``, ``:admin``), a text with
    spaces or a list. Empty: every token may chat, read and write."""
    leeway_seconds: int = Field(30, ge=0, le=600)
    """How far clocks may differ."""

    @model_validator(mode="after")
    def _one_key_set(self) -> Self:
        if bool(self.jwks_uri) == bool(self.jwks_file):
            raise ValueError("give either 'jwks_uri' or 'jwks_file'")
        return self


class LimitConfig(_Section):
    """How often requests may come; 429 with ``Retry-After`` above it. None means no limit."""

    key_requests_per_minute: int | None = Field(None, ge=1, le=1_000_000)
    """Of one API key, or of one token's subject."""
    user_requests_per_minute: int | None = Field(None, ge=1, le=1_000_000)
    """That name one user, whoever sends them."""
    burst: int = Field(20, ge=1, le=100_000)
    """How many may come at once after a pause."""


class AuthConfig(_Section):
    """Who may call the server, and whose memory a caller may name."""

    mode: Literal["none", "apiKey", "jwt"] = "none"
    """``apiKey``: keys of a file, each for some users or all; ``jwt``: a token opens the memory of
    the user that it names."""
    keys_file: str = Field("", max_length=4096)
    """File of mode ``apiKey``: one key, or a JSON document with several."""
    jwt: JwtConfig | None = None
    """Settings of mode ``jwt``."""
    limits: LimitConfig = LimitConfig()
    audit: str = Field("", max_length=4096)
    """Audit log: a file, ``log`` for the server's own log, or empty for none."""

    @model_validator(mode="after")
    def _mode_has_its_settings(self) -> Self:
        if bool(self.keys_file) != (self.mode == "apiKey"):
            raise ValueError("'keys_file' belongs to mode 'apiKey'; give both or neither")
        if (self.jwt is not None) != (self.mode == "jwt"):
            raise ValueError("'jwt' belongs to mode 'jwt'; give both or neither")
        return self


class InjectConfig(_Section):
    """How stored KV is written into the engine's cache."""

    writer: Literal["auto", "portable"] = "auto"
    """``auto`` takes the compiled writer where it is proved at start to give the same bytes;
    ``portable`` always writes through the engine's own layers."""


class CanaryConfig(_Section):
    """Scoring of prompts as text and as injected, by the server itself."""

    sample: float = Field(0.0, ge=0, le=1)
    """Share of users' injected requests that are scored afterwards; 0 scores none."""
    start_samples: int = Field(0, ge=0, le=100)
    """Prompts of each store that are scored at start, and again when the store is degraded; 0
    scores none."""
    start_timeout_ms: int = Field(20_000, ge=0, le=3_600_000)
    """How long the server waits for that before it is ready; it goes on behind it."""
    tokens: int = Field(8, ge=1, le=256)
    """Tokens of the answer that are compared, in each prompt."""
    kl_limit: float = Field(0.2, gt=0)
    """Most nats of KL(text || injected), as a mean over the window; above it the store goes as
    text. What cannot be told from the 20 most likely tokens is left out, so the true figure may be
    higher."""
    top1_limit: float = Field(0.6, ge=0, le=1)
    """Least share of positions at which text and injected memory expect the same token most."""
    window: int = Field(20, ge=1, le=10_000)
    """Prompts that the figures are taken over, the latest ones."""
    recheck_seconds: int = Field(300, ge=1, le=86_400)
    """How long a degraded store goes as text before it is tried again."""


class StoreShare(_Section):
    """What one store may have of the DRAM arena."""

    tier: Literal["gpu", "dram", "disk"] = "dram"
    """``disk``: its segments stay only while nobody else needs the room; ``gpu``: also kept in GPU
    memory by use."""
    floor_bytes: int = Field(0, ge=0)
    """Bytes that other stores cannot take from it."""
    ceiling_bytes: int | None = Field(None, ge=0)
    """Most bytes; None is no limit."""

    @model_validator(mode="after")
    def _floor_below_ceiling(self) -> Self:
        if self.ceiling_bytes is not None and self.floor_bytes > self.ceiling_bytes:
            raise ValueError(
                f"field 'floor_bytes': {self.floor_bytes} is above ceiling_bytes "
                f"{self.ceiling_bytes}; lower it"
            )
        return self


class TierPlan(_Section):
    """The plan file of a running server: its budgets now. Written by the operator."""

    version: Literal[1] = 1
    """Version of this document."""
    dram_bytes: int | None = Field(None, ge=0)
    """Bytes that segments may take in the DRAM arena; at most its size, which None means."""
    gpu_bytes: int | None = Field(None, ge=0)
    """Bytes of the GPU arena per GPU; at most ``tiers.gpu_bytes``, which None means."""
    stores: dict[str, StoreShare] = Field({}, max_length=MAX_PLANNED_STORES)
    """By store name; a store that is not named has no limits."""

    @model_validator(mode="after")
    def _floors_fit(self) -> Self:
        floors = sum(share.floor_bytes for share in self.stores.values())
        if self.dram_bytes is not None and floors > self.dram_bytes:
            raise ValueError(
                f"field 'dram_bytes': {self.dram_bytes} is below the sum of the floors, {floors}; "
                "lower the floors"
            )
        return self


class RuntimeConfig(_Section):
    """What ``inferscale encode`` and ``inferscale serve`` need beside vLLM's own flags."""

    store: str = Field("", max_length=4096)
    """Folder or fsspec URL of the store; the short form of ``stores`` with one entry."""
    stores: tuple[StoreEntry, ...] = Field((), max_length=MAX_STORES)
    """Stores of a server, asked in this order when a request names none. Names are unique."""
    run_dir: str = Field("", max_length=4096)
    """Private folder of one server: arena, leases and capability secret. Set by ``serve``."""
    prompt: PromptConfig = PromptConfig()
    encoding: EncodingConfig = EncodingConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    tiers: TierConfig = TierConfig()
    inject: InjectConfig = InjectConfig()
    sessions: SessionConfig = SessionConfig()
    canary: CanaryConfig = CanaryConfig()
    quota: QuotaConfig = QuotaConfig()
    retention: RetentionConfig = RetentionConfig()
    auth: AuthConfig = AuthConfig()

    @model_validator(mode="after")
    def _one_way_to_name_stores(self) -> Self:
        if self.store and self.stores:
            raise ValueError("'store' and 'stores' are both given; leave one of them out")
        names = [entry.name for entry in self.stores]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"field 'stores': name '{name}' is given twice; rename one")
        return self

    @property
    def store_entries(self) -> tuple[StoreEntry, ...]:
        """The stores, whichever way they are given; empty when none is."""
        if self.stores or not self.store:
            return self.stores
        return (StoreEntry(name=DEFAULT_STORE_NAME, url=self.store),)


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
