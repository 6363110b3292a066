"""``MemoryStore``: whose facts, encoded for which model, kept where."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from inferscale_operator.api.base import (
    Model,
    ObjectName,
    Quantity,
    Scheduling,
    SecretKeyRef,
    SecretRef,
    Size,
    at_least,
)
from inferscale_operator.api.rules import Resource, Rule, Struct, same_optional
from inferscale_operator.api.sources import (
    ApiSource,
    ConfigMapSource,
    HttpSource,
    LettaSource,
    Mem0Source,
    PvcSource,
    ZepSource,
)
from inferscale_operator.api.store_status import MemoryStoreStatus
from inferscale_operator.api.tiers import Placement
from inferscale_runtime.config import DEFAULT_FOOTER, DEFAULT_HEADING

POLICY_PATTERN = r"^(none|all|(turns|facts|neighbours|chain):[1-9][0-9]{0,3})$"
CRON_PATTERN = r"^[0-9A-Za-z*/,#-]+( [0-9A-Za-z*/,#-]+){4}$"
EMBEDDER_PATTERN = r"^(minilm|/[^\s]+|openai:[^@\s]+@https?://[^\s]+)$"


class Prompt(Struct):
    """Fixed texts around the facts. Changing one means encoding again."""

    heading: str = Field(DEFAULT_HEADING, min_length=1, max_length=8192)
    """What stands before the first fact."""
    fact_format: str = Field("- {text}\n", max_length=256, pattern=r"^[\s\S]*\{text\}[\s\S]*$")
    """How one fact is written; ``{text}`` is the fact."""
    footer: str = Field(DEFAULT_FOOTER, max_length=8192)
    """What stands between the last fact and the client's own system text."""


class Encoding(Struct):
    """How facts are read."""

    rules = (
        Rule(
            cel="!has(self.embedderApiKeySecretRef) || self.embedder.startsWith('openai:')",
            message="embedderApiKeySecretRef is for an 'openai:' embedder; remove it",
            holds=lambda self: self.embedder_api_key_secret_ref is None
            or self.embedder.startswith("openai:"),
        ),
    )

    policy: str = Field("neighbours:10", max_length=32, pattern=POLICY_PATTERN)
    """What is read before a fact: ``none``, ``turns:N``, ``facts:N``, ``neighbours:N``,
    ``chain:N``, ``all``."""
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """How KV is stored and kept in memory: ``auto`` as the model computes it; ``int8`` and ``fp8``
    take half the bytes of bfloat16 and a quarter of those of float32. Servers keep their arenas
    quantised when all stores of a model agree. Another value encodes everything again."""
    embedder: str = Field("minilm", max_length=1024, pattern=EMBEDDER_PATTERN)
    """``minilm``, a folder in the image, or ``openai:MODEL@URL``."""
    embedder_api_key_secret_ref: SecretKeyRef | None = None
    """API key of an ``openai:`` embedder."""


class S3Location(Struct):
    """An object or prefix in S3-compatible storage."""

    url: str = Field(max_length=1024, pattern=r"^s3://[a-z0-9][-a-z0-9.]{1,61}[a-z0-9](/[^\s]*)?$")
    """``s3://bucket/key``."""
    endpoint_url: str | None = Field(None, max_length=1024, pattern=r"^https?://[^\s@]+$")
    """Endpoint of a compatible service; AWS when absent."""
    region: str | None = Field(None, max_length=64, pattern=r"^[-a-z0-9]+$")
    """Region."""
    credentials_secret_ref: SecretRef | None = None
    """Secret with ``AWS_ACCESS_KEY_ID`` and ``AWS_SECRET_ACCESS_KEY``; else the pod's identity."""

    @property
    def client(self) -> tuple[str | None, str | None, SecretRef | None]:
        """What a client needs beside the address; a pod has one of each."""
        return self.endpoint_url, self.region, self.credentials_secret_ref


_KINDS = {
    "configMap": "config_map",
    "pvc": "pvc",
    "http": "http",
    "s3": "s3",
    "mem0": "mem0",
    "zep": "zep",
    "letta": "letta",
    "api": "api",
}
"""Kinds of sources, by their names in a manifest and in Python."""


class Source(Struct):
    """Where the facts come from; exactly one kind."""

    rules = (
        Rule(
            cel=f"[{', '.join(f'has(self.{kind})' for kind in _KINDS)}].filter(x, x).size() == 1",
            message=f"set exactly one of {', '.join(_KINDS)}",
            holds=lambda self: sum(getattr(self, kind) is not None for kind in _KINDS.values())
            == 1,
        ),
        Rule(
            cel="!has(self.refresh) || !(has(self.configMap) || has(self.api))",
            message="a ConfigMap is watched and api has no input: remove refresh",
            holds=lambda self: self.refresh is None
            or (self.config_map is None and self.api is None),
        ),
    )

    config_map: ConfigMapSource | None = None
    """A ConfigMap."""
    pvc: PvcSource | None = None
    """A file or folder of a claim."""
    http: HttpSource | None = None
    """An HTTP(S) address."""
    s3: S3Location | None = None
    """An object in S3-compatible storage."""
    mem0: Mem0Source | None = None
    """The memory tool Mem0."""
    zep: ZepSource | None = None
    """The memory tool Zep."""
    letta: LettaSource | None = None
    """The memory tool Letta."""
    api: ApiSource | None = None
    """The memory API; no input at all."""
    refresh: str | None = Field(None, min_length=9, max_length=64, pattern=CRON_PATTERN)
    """Cron schedule (five fields, UTC) on which the source is read again."""


class PvcStorage(Struct):
    """The store in a volume."""

    rules = (
        Rule(
            cel="!(has(self.claimName) && has(self.storageClassName))",
            message="storageClassName is for a claim made by the operator; remove it or claimName",
            holds=lambda self: self.claim_name is None or self.storage_class_name is None,
        ),
    )

    claim_name: ObjectName | None = None
    """Existing claim. Absent: the operator makes one."""
    size: Annotated[
        Size,
        Rule(
            cel="quantity(string(self)).compareTo(quantity(string(oldSelf))) >= 0",
            message="a volume cannot shrink; keep its size, or make another MemoryStore",
            holds=None,
        ),
    ] = "10Gi"
    """Size of the claim that the operator makes; may grow where the class allows it, not shrink."""
    storage_class_name: ObjectName | None = None
    """Storage class of that claim; the cluster's default when absent."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = "ReadWriteOnce"
    """ReadWriteMany is needed when servers run on other nodes than the encoding job."""


def _unchanged(parent: str, *fields: str) -> str:
    """CEL: optional fields of an optional part have their old values, or lack of one."""
    path = f"self.{parent}"
    same = " && ".join(
        same_optional(f"{path}.{field}", f"oldSelf.{parent}.{field}") for field in fields
    )
    return f"(!has({path}) || !has(oldSelf.{parent}) || ({same}))"


_UNCHANGED = (
    Rule(
        cel=(
            "has(self.s3) == has(oldSelf.s3) && "
            + _unchanged("s3", "url", "endpointUrl")
            + " && "
            + _unchanged("pvc", "claimName")
        ),
        message="the place of a store cannot be changed; make another MemoryStore",
        holds=None,
    ),
    Rule(
        cel=_unchanged("pvc", "storageClassName", "accessMode"),
        message="storageClassName and accessMode cannot be changed; make another MemoryStore",
        holds=None,
    ),
)


class Storage(Struct):
    """Where the store lies; cannot be changed."""

    rules = (
        Rule(
            cel="has(self.pvc) != has(self.s3)",
            message="set exactly one of pvc and s3",
            holds=lambda self: (self.pvc is None) != (self.s3 is None),
        ),
        *_UNCHANGED,
    )

    pvc: PvcStorage | None = None
    """A volume; the default."""
    s3: S3Location | None = None
    """A prefix in S3-compatible storage that holds nothing else."""


class Quota(Struct):
    """Limits; what exceeds them is refused before anything is written."""

    max_bytes: Size | None = None
    """Most bytes of the whole store."""
    max_facts_per_user: int | None = Field(None, ge=1, le=10_000_000)
    """Most facts of one user."""


class Retention(Struct):
    """How long facts and stored bytes are kept."""

    max_age_days: int | None = Field(None, ge=1, le=36_500)
    """Facts and turns whose ``time`` is an older ISO 8601 date are dropped by the next encoding; a
    fact of the memory API without such a time has that of its last change."""

    on_delete: Literal["Erase", "Retain"] = "Erase"
    """Whether deleting the MemoryStore erases its files. ``Retain`` keeps existing claims and
    object storage as they are; a claim made by the operator goes in any case."""


class Job(Scheduling):
    """The encoding job."""

    parallelism: int = Field(1, ge=1, le=64)
    """Pods that encode at once; each takes a share of the users."""
    kv_cache: Annotated[Quantity, at_least("64Mi")] = "1Gi"
    """Size of the encoding engine's KV cache."""
    backoff_limit: int = Field(3, ge=0, le=100)
    """How often a failed job is started again before the operator waits for a change."""
    timeout_seconds: int = Field(86_400, ge=60, le=31_536_000)
    """Longest run of one job."""


_CREDENTIALS = (
    "self.source.s3.credentialsSecretRef",
    "self.storage.s3.credentialsSecretRef",
)


class MemoryStoreSpec(Struct):
    """Desired state of a memory store."""

    rules = (
        Rule(
            cel=(
                "!has(self.source.s3) || !has(self.storage) || !has(self.storage.s3) || ("
                + same_optional("self.source.s3.endpointUrl", "self.storage.s3.endpointUrl")
                + " && "
                + same_optional("self.source.s3.region", "self.storage.s3.region")
                + " && "
                + same_optional(*_CREDENTIALS, ".name")
                + ")"
            ),
            message=(
                "source.s3 and storage.s3 must have the same endpointUrl, region and"
                " credentialsSecretRef: one pod reads and writes both"
            ),
            holds=lambda self: self.source.s3 is None
            or self.storage.s3 is None
            or self.source.s3.client == self.storage.s3.client,
        ),
    )

    model: Model
    """The model that the facts are encoded for."""
    prompt: Prompt = Field(default_factory=Prompt)
    """Texts around the facts."""
    encoding: Encoding = Field(default_factory=Encoding)
    """How facts are read."""
    source: Source
    """Where the facts come from."""
    storage: Storage = Field(default_factory=lambda: Storage(pvc=PvcStorage()))
    """Where the store lies."""
    placement: Placement = Field(default_factory=Placement)
    """Where servers keep its KV."""
    quota: Quota = Field(default_factory=Quota)
    """Limits."""
    retention: Retention = Field(default_factory=Retention)
    """What happens to stored bytes."""
    job: Job = Field(default_factory=Job)
    """The encoding job."""
    suspend: bool = False
    """True stops new encoding jobs; what is encoded stays in use."""


class MemoryStore(Resource):
    """Facts of people, encoded once for one model."""

    spec: MemoryStoreSpec
    status: MemoryStoreStatus = Field(default_factory=MemoryStoreStatus)
