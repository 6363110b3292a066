"""``RuntimeConfig`` of jobs and servers, valid because it is made by the runtime's own model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from inferscale_operator.api.auth import Auth
from inferscale_operator.api.memorystore import MemoryStoreSpec, Quota
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.desired.paths import (
    AUTH_KEYS_FILE,
    EMBEDDER_KEY_FILE,
    JWKS_FILE,
    PLAN_FILE,
    SERVER_STORES,
    STORE,
)
from inferscale_operator.desired.stores import StoreView, remote_embedders, store_url
from inferscale_runtime.budget import MIB, ConfigError, format_quantity, parse_quantity
from inferscale_runtime.config import (
    AuthConfig,
    CanaryConfig,
    EncodingConfig,
    JwtConfig,
    KVDtype,
    LimitConfig,
    PromptConfig,
    QuotaConfig,
    RetentionConfig,
    RetrievalConfig,
    RuntimeConfig,
    StoreEntry,
    TierConfig,
)

FILE = "config.json"
"""Key of the ConfigMap, and name of the file."""


def encode_config(name: str, spec: MemoryStoreSpec) -> Manifest:
    """Settings of an encoding job.

    Args:
        name: Of the MemoryStore.
        spec: Its spec.

    Raises:
        ConfigError: When a size is too small; names field, value and mend.
    """
    key = spec.encoding.embedder_api_key_secret_ref
    return _dump(
        RuntimeConfig(
            store=store_url(name, spec, STORE),
            prompt=_prompt(spec),
            encoding=EncodingConfig(
                policy=spec.encoding.policy,
                embedder=spec.encoding.embedder,
                **_kv_dtype([spec.encoding.kv_dtype]),
            ),
            retrieval=RetrievalConfig(embedder_api_key_file=EMBEDDER_KEY_FILE if key else ""),
            quota=_quota(spec.quota),
            retention=RetentionConfig(max_age_days=spec.retention.max_age_days),
        )
    )


def _kv_dtype(wanted: Sequence[KVDtype]) -> dict[str, KVDtype]:
    """An arena has one form; where stores differ, it is plain and rows are unpacked into it."""
    return {"kv_dtype": wanted[0]} if set(wanted) in ({"int8"}, {"fp8"}) else {}


def serve_config(
    spec: PersonalizedModelSpec, stores: Sequence[StoreView], gpu_arena_bytes: int = 0
) -> Manifest:
    """Settings of a server.

    Prompt and policy are those of the first store: the runtime takes each store's own from its
    preamble, and these only where a store has none yet.

    Args:
        spec: Of the PersonalizedModel.
        stores: Its stores in the order of the spec, at least one.
        gpu_arena_bytes: Size of the arena in each GPU.

    Raises:
        ConfigError: When a size is too small; names field, value and mend.
    """
    remote = remote_embedders(stores)
    first = (remote or stores)[0].spec.encoding
    retrieval = spec.retrieval
    return _dump(
        RuntimeConfig(
            stores=tuple(
                StoreEntry(
                    name=store.name,
                    url=store_url(store.name, store.spec, f"{SERVER_STORES}/{store.name}"),
                    expected_fingerprint=store.fingerprint or None,
                    # Any other source has its claim mounted read-only.
                    **({} if store.spec.source.api is not None else {"writable": False}),
                )
                for store in stores
            ),
            prompt=_prompt(stores[0].spec),
            encoding=EncodingConfig(
                policy=stores[0].spec.encoding.policy,
                embedder=first.embedder,
                **_kv_dtype([store.spec.encoding.kv_dtype for store in stores]),
            ),
            retrieval=RetrievalConfig(
                top_k=retrieval.top_k,
                link_tail=retrieval.link_tail,
                min_score=retrieval.min_score,
                order=retrieval.order,
                unknown_user=retrieval.unknown_user,
                embedder_api_key_file=EMBEDDER_KEY_FILE
                if remote and first.embedder_api_key_secret_ref
                else "",
            ),
            **({"canary": CanaryConfig(**spec.canary.model_dump())} if spec.canary else {}),
            tiers=TierConfig(
                dram_bytes=_bytes("spec.tiers.dram", spec.tiers.dram, MIB),
                stage_timeout_ms=spec.tiers.stage_timeout_ms,
                plan_file=PLAN_FILE,
                **({"gpu_bytes": gpu_arena_bytes} if gpu_arena_bytes else {}),
            ),
            **_auth(spec.auth),
            **_written_quota(stores),
        )
    )


def _written_quota(stores: Sequence[StoreView]) -> dict[str, QuotaConfig]:
    """Quota of the memory API: that of the first store that it writes."""
    written = [store.spec.quota for store in stores if store.spec.source.api is not None]
    if not written or not (written[0].max_facts_per_user or written[0].max_bytes):
        return {}
    return {"quota": _quota(written[0])}


def _quota(quota: Quota) -> QuotaConfig:
    return QuotaConfig(
        max_facts_per_user=quota.max_facts_per_user,
        max_store_bytes=_bytes("spec.quota.maxBytes", quota.max_bytes, 1)
        if quota.max_bytes
        else None,
    )


def _auth(auth: Auth) -> dict[str, AuthConfig]:
    """``auth`` of a server; absent where the spec says nothing about it."""
    fields: dict[str, Any] = {}
    if auth.mode == "apiKey":
        fields = {"mode": "apiKey", "keys_file": AUTH_KEYS_FILE}
    if auth.jwt is not None:
        jwt = auth.jwt
        keys = {"jwks_uri": jwt.jwks_uri} if jwt.jwks_uri else {"jwks_file": JWKS_FILE}
        fields["mode"] = "jwt"
        fields["jwt"] = JwtConfig(
            issuer=jwt.issuer,
            audience=tuple(jwt.audience),
            algorithms=tuple(jwt.algorithms),
            user_claim=jwt.user_claim,
            scope_claim=jwt.scope_claim or "",
            leeway_seconds=jwt.leeway_seconds,
            **keys,
        )
    limits = {
        "key_requests_per_minute": auth.limits.key_requests_per_minute,
        "user_requests_per_minute": auth.limits.user_requests_per_minute,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    if given:
        fields["limits"] = LimitConfig(burst=auth.limits.burst, **given)
    if auth.audit == "Log":
        fields["audit"] = "log"
    return {"auth": AuthConfig(**fields)} if fields else {}


def config_text(config: Manifest) -> str:
    """The document as it lies in the ConfigMap."""
    return json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _prompt(spec: MemoryStoreSpec) -> PromptConfig:
    prompt = spec.prompt
    return PromptConfig(
        heading=prompt.heading, fact_format=prompt.fact_format, footer=prompt.footer
    )


def _bytes(field: str, text: str, least: int) -> int:
    value = parse_quantity(text)
    if value < least:
        raise ConfigError(f"{field} '{text}': must be at least {format_quantity(least)}; raise it")
    return value


def _dump(config: RuntimeConfig) -> Manifest:
    # Only what the spec decides: a new release with further settings then changes no document, so
    # it replaces no server, and an image of the release before (which refuses unknown fields)
    # starts.
    return config.model_dump(mode="json", exclude_unset=True)
