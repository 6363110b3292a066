"""Which objects a custom resource names in its spec; pure."""

from __future__ import annotations

from typing import Any

from inferscale_operator.desired.kinds import (
    CLAIM,
    CONFIG_MAP,
    MEMORY_STORE,
    SECRET,
    Manifest,
)
from inferscale_operator.planner.plan import ChildKey

_SECRETS = (
    "model.tokenSecretRef.name",
    "encoding.embedderApiKeySecretRef.name",
    "source.http.authorizationSecretRef.name",
    "source.mem0.tokenSecretRef.name",
    "source.zep.tokenSecretRef.name",
    "source.letta.tokenSecretRef.name",
    "source.s3.credentialsSecretRef.name",
    "storage.s3.credentialsSecretRef.name",
    "auth.secretRef.name",
    "auth.keysSecretRef.name",
    "auth.jwt.jwksSecretRef.name",
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
