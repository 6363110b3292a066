"""Which objects a custom resource names in its spec; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inferscale_operator.api.base import Model, Scheduling, SecretKeyRef, SecretRef
from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.kinds import (
    CLAIM,
    CONFIG_MAP,
    MEMORY_STORE,
    SECRET,
    Manifest,
)
from inferscale_operator.planner.plan import ChildKey, Observed

API_KEY = "api-key"
"""Key of the Secret that holds a server's API key."""
_S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")

_SECRETS = (
    "model.tokenSecretRef.name",
    "encoding.embedderApiKeySecretRef.name",
    "source.http.authorizationSecretRef.name",
    "source.s3.credentialsSecretRef.name",
    "storage.s3.credentialsSecretRef.name",
    "auth.secretRef.name",
)
_CLAIMS = ("model.cache.claimName", "source.pvc.claimName", "storage.pvc.claimName")
_CONFIG_MAPS = ("source.configMap.name",)
_SECRET_LISTS = ("job.imagePullSecrets", "serving.imagePullSecrets")


def references(resource: Manifest) -> list[ChildKey]:
    """(kind, name) of every object that the spec names, without repetition, in a fixed order.

    Args:
        resource: A custom resource of either kind, as the API server returns it.
    """
    spec = resource.get("spec") or {}
    found: dict[ChildKey, None] = {}
    for kind, paths in ((SECRET, _SECRETS), (CLAIM, _CLAIMS), (CONFIG_MAP, _CONFIG_MAPS)):
        for path in paths:
            name = _at(spec, path)
            if name:
                found[kind.kind, str(name)] = None
    for path in _SECRET_LISTS:
        for item in _at(spec, path) or []:
            found[SECRET.kind, str(item["name"])] = None
    for name in store_names(resource):
        found[MEMORY_STORE.kind, name] = None
    return list(found)


def store_names(resource: Manifest) -> list[str]:
    """Names of the MemoryStores that a PersonalizedModel uses."""
    stores = (resource.get("spec") or {}).get("memoryStores") or []
    return [str(item["name"]) for item in stores]


def _at(value: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


@dataclass(frozen=True, slots=True)
class Reference:
    """An object that a field names.

    Attributes:
        field: Path of the field.
        kind: Kind of the object.
        name: Name of the object.
        keys: Keys that it must hold.
    """

    field: str
    kind: str
    name: str
    keys: tuple[str, ...] = ()


def source_references(spec: MemoryStoreSpec) -> list[Reference]:
    """What reading the source needs."""
    source, found = spec.source, []
    if source.config_map is not None:
        keys = (source.config_map.key,) if source.config_map.key is not None else ()
        found.append(
            Reference("spec.source.configMap.name", CONFIG_MAP.kind, source.config_map.name, keys)
        )
    if source.pvc is not None:
        found.append(Reference("spec.source.pvc.claimName", CLAIM.kind, source.pvc.claim_name))
    if source.http is not None:
        found += _key(
            "spec.source.http.authorizationSecretRef", source.http.authorization_secret_ref
        )
    if source.s3 is not None:
        found += _s3("spec.source.s3.credentialsSecretRef", source.s3.credentials_secret_ref)
    return found


def storage_references(spec: MemoryStoreSpec) -> list[Reference]:
    """What the place of the store needs."""
    storage = spec.storage
    if storage.s3 is not None:
        return _s3("spec.storage.s3.credentialsSecretRef", storage.s3.credentials_secret_ref)
    if storage.pvc is not None and storage.pvc.claim_name is not None:
        return [Reference("spec.storage.pvc.claimName", CLAIM.kind, storage.pvc.claim_name)]
    return []


def encoder_references(spec: MemoryStoreSpec) -> list[Reference]:
    """What an encoding job needs beside source and storage."""
    return [
        *_model(spec.model),
        *_key("spec.encoding.embedderApiKeySecretRef", spec.encoding.embedder_api_key_secret_ref),
        *_pull("spec.job.imagePullSecrets", spec.job),
    ]


def server_references(spec: PersonalizedModelSpec) -> list[Reference]:
    """What server pods need beside their stores."""
    found = [*_model(spec.model), *_pull("spec.serving.imagePullSecrets", spec.serving)]
    if spec.auth.secret_ref is not None:
        name = spec.auth.secret_ref.name
        found.append(Reference("spec.auth.secretRef.name", SECRET.kind, name, (API_KEY,)))
    return found


def first_missing(needed: Sequence[Reference], observed: Observed) -> tuple[str, str] | None:
    """Reason and message for the first object, or key in it, that is not there; else None."""
    for item in needed:
        live = observed.references.get((item.kind, item.name))
        if live is None:
            return (
                f"{item.kind}Missing",
                f"{item.field}: {item.kind} '{item.name}' does not exist in this namespace; "
                "make it, or name another",
            )
        held = {**(live.get("data") or {}), **(live.get("binaryData") or {})}
        for key in item.keys:
            if key not in held:
                return (
                    f"{item.kind}KeyMissing",
                    f"{item.field}: {item.kind} '{item.name}' has no key '{key}'; add it",
                )
    return None


def _model(model: Model) -> list[Reference]:
    found = _key("spec.model.tokenSecretRef", model.token_secret_ref)
    if model.cache.claim_name is not None:
        found.append(Reference("spec.model.cache.claimName", CLAIM.kind, model.cache.claim_name))
    return found


def _key(field: str, reference: SecretKeyRef | None) -> list[Reference]:
    if reference is None:
        return []
    return [Reference(field, SECRET.kind, reference.name, (reference.key,))]


def _s3(field: str, reference: SecretRef | None) -> list[Reference]:
    if reference is None:
        return []
    return [Reference(field, SECRET.kind, reference.name, _S3_KEYS)]


def _pull(field: str, scheduling: Scheduling) -> list[Reference]:
    return [Reference(field, SECRET.kind, item.name) for item in scheduling.image_pull_secrets]
