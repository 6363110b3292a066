"""Observed state of a ``MemoryStore``."""

from __future__ import annotations

from pydantic import Field

from inferscale_operator.api.base import ConditionList
from inferscale_operator.api.rules import Struct


class StoreFacts(Struct):
    """Counts of the last complete encoding."""

    users: int = Field(0, ge=0)
    """Users in the store."""
    total: int = Field(0, ge=0)
    """Facts in the source."""
    encoded: int = Field(0, ge=0)
    """Facts with KV for the current fingerprint."""
    summary: str = Field("", max_length=64)
    """``encoded/total``."""


class JobStatus(Struct):
    """The current or last encoding job."""

    name: str = Field("", max_length=253)
    """Name of the Job."""
    input: str = Field("", max_length=64)
    """Digest of everything that the job was started for."""
    attempt: int = Field(0, ge=0)
    """Number of the start for this input, from 0."""
    finished_at: str | None = Field(None, max_length=32, json_schema_extra={"format": "date-time"})
    """When it ended; absent while it runs."""
    exit_code: int = 0
    """Exit code of the first pod that failed, -1 when it was lost without one."""
    last_error: str = Field("", max_length=4096)
    """Last line of the failed pod."""


class PendingFacts(Struct):
    """Facts that wait for their KV, of a store that is written through the memory API."""

    facts: int = Field(0, ge=0)
    """How many, as the servers said last."""
    since: str | None = Field(None, max_length=32, json_schema_extra={"format": "date-time"})
    """Since when there are any."""
    too_long: int = Field(0, ge=0)
    """Facts that are longer than the model allows, as the last job said; they stay text."""
    runs: int = Field(0, ge=0)
    """Jobs that were started for waiting facts."""


class ModelShape(Struct):
    """Shape of the model's KV, as the encoder reported it."""

    num_layers: int = Field(0, ge=0)
    """Attention layers."""
    num_attention_heads: int = Field(0, ge=0)
    """Query heads over all ranks."""
    num_kv_heads: int = Field(0, ge=0)
    """KV heads over all ranks."""
    head_dim: int = Field(0, ge=0)
    """Size of one head."""
    kv_dtype: str = Field("", max_length=32)
    """Dtype of stored KV."""
    weight_bytes: int = Field(0, ge=0)
    """Bytes of the weights' files."""


class MemoryStoreStatus(Struct):
    """Observed state."""

    observed_generation: int = Field(0, ge=0)
    """Generation of the spec that this status belongs to."""
    conditions: ConditionList
    """``SourceReady``, ``StorageBound``, ``Encoded``, the summary ``Ready``, and ``Degraded``,
    which is no part of it: servers found its injected answers too far from text."""
    facts: StoreFacts = Field(default_factory=StoreFacts)
    """Counts."""
    fingerprint: str = Field("", max_length=128)
    """Fingerprint of the encoding in use."""
    encoded_input: str = Field("", max_length=64)
    """Digest of what ``fingerprint`` was encoded from: spec fields, image and source version."""
    encoded_model: str = Field("", max_length=1024)
    """Model that ``fingerprint`` belongs to: ``id@revision:dtype``."""
    store_bytes: int = Field(0, ge=0)
    """Bytes of the store."""
    tier: str = Field("", max_length=16)
    """Fastest tier that servers keep it in: ``gpu``, ``dram``, else ``disk``, or ``object`` for
    S3."""
    location: str = Field("", max_length=1024)
    """Claim or URL of the store."""
    last_sync_time: str | None = Field(
        None, max_length=32, json_schema_extra={"format": "date-time"}
    )
    """When the source was last read completely."""
    next_sync_time: str | None = Field(
        None, max_length=32, json_schema_extra={"format": "date-time"}
    )
    """When the schedule reads it next."""
    job: JobStatus = Field(default_factory=JobStatus)
    """The encoding job."""
    pending: PendingFacts | None = None
    """Facts that wait for their KV."""
    model_shape: ModelShape = Field(default_factory=ModelShape)
    """Shape of the model's KV."""
