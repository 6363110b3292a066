"""What an encoding run is for, as two digests: what the spec says, and the source's version."""

from __future__ import annotations

from typing import Any

from inferscale_operator.api.base import Model
from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.desired.kinds import CONFIG_MAP, Manifest
from inferscale_operator.desired.naming import digest
from inferscale_operator.planner.conditions import timestamp
from inferscale_operator.planner.plan import Defaults, Observed
from inferscale_operator.planner.schedule import last_due

HALF = 12
"""Characters of each half of an input."""


def model_key(model: Model) -> str:
    """What an encoding belongs to, as written in ``status.encodedModel``."""
    return f"{model.id}@{model.revision or ''}:{model.dtype}"


def encoded_part(spec: MemoryStoreSpec, defaults: Defaults) -> str:
    """Digest of what the encoding depends on; the image holds the engine and the encoder."""
    fields = spec.model_dump(
        mode="json",
        by_alias=True,
        exclude={"storage", "placement", "job", "suspend", "retention"},
    )
    fields["maxAgeDays"] = spec.retention.max_age_days
    fields["image"] = spec.job.image or defaults.runtime_image
    fields["model"].pop("cache")
    # When a job is started for waiting facts is no part of what it makes of them.
    if fields["source"].pop("api") is not None:
        fields["source"]["api"] = {}
    return digest(fields, HALF)


def source_part(spec: MemoryStoreSpec, observed: Observed, status: Manifest) -> str:
    """Digest of the version of the source.

    That is a ConfigMap's content, the last due time, or how often waiting facts asked for a job.
    """
    source = spec.source
    version: Any = None
    if source.config_map is not None:
        live = observed.references.get((CONFIG_MAP.kind, source.config_map.name), {})
        data = live.get("data", {})
        version = {
            key: value
            for key, value in data.items()
            if (key == source.config_map.key if source.config_map.key else key.endswith(".jsonl"))
        }
    elif source.api is not None:
        version = (status.get("pending") or {}).get("runs", 0)
    elif source.refresh is not None:
        version = timestamp(last_due(source.refresh, observed.now))
    return digest(version, HALF)
