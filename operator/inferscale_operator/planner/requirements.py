"""What must be there before a job or a server can start, and what is missing of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inferscale_operator.api.base import Model, SecretKeyRef, SecretRef
from inferscale_operator.api.memorystore import MemoryStoreSpec, S3Location
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.kinds import CLAIM, CONFIG_MAP, SECRET
from inferscale_operator.planner.plan import Observed

S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
API_KEY = "api-key"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One object that a spec names.

    Attributes:
        field: Path in the resource, for messages.
        kind: Its kind.
        name: Its name.
        keys: Keys that a Secret or ConfigMap must have.
    """

    field: str
    kind: str
    name: str
    keys: tuple[str, ...] = ()


def source_requirements(spec: MemoryStoreSpec) -> list[Requirement]:
    """What must be there before the source can be read."""
    source = spec.source
    found: list[Requirement] = []
    if source.config_map is not None:
        keys = (source.config_map.key,) if source.config_map.key else ()
        name = source.config_map.name
        found.append(Requirement("spec.source.configMap", CONFIG_MAP.kind, name, keys))
    if source.pvc is not None:
        found.append(Requirement("spec.source.pvc.claimName", CLAIM.kind, source.pvc.claim_name))
    if source.http is not None:
        path = "spec.source.http.authorizationSecretRef"
        found.extend(_secret(path, source.http.authorization_secret_ref))
    for name, tool in (("mem0", source.mem0), ("zep", source.zep), ("letta", source.letta)):
        if tool is not None:
            found.extend(_secret(f"spec.source.{name}.tokenSecretRef", tool.token_secret_ref))
    found.extend(_s3("spec.source.s3", source.s3))
    return found


def storage_requirements(spec: MemoryStoreSpec) -> list[Requirement]:
    """What must be there before the store can be written."""
    found = list(_s3("spec.storage.s3", spec.storage.s3))
    if spec.storage.pvc is not None and spec.storage.pvc.claim_name is not None:
        name = spec.storage.pvc.claim_name
        found.append(Requirement("spec.storage.pvc.claimName", CLAIM.kind, name))
    return found


def encoder_requirements(spec: MemoryStoreSpec) -> list[Requirement]:
    """What an encoding job needs beside source and storage."""
    path = "spec.encoding.embedderApiKeySecretRef"
    return [
        *_model(spec.model),
        *_secret(path, spec.encoding.embedder_api_key_secret_ref),
        *_pull_secrets("spec.job", spec.job.image_pull_secrets),
    ]


def server_requirements(spec: PersonalizedModelSpec) -> list[Requirement]:
    """What a server needs beside its stores."""
    found = list(_model(spec.model))
    if spec.auth.secret_ref is not None:
        name = spec.auth.secret_ref.name
        found.append(Requirement("spec.auth.secretRef", SECRET.kind, name, (API_KEY,)))
    found.extend(_secret("spec.auth.keysSecretRef", spec.auth.keys_secret_ref))
    if spec.auth.jwt is not None:
        found.extend(_secret("spec.auth.jwt.jwksSecretRef", spec.auth.jwt.jwks_secret_ref))
    found.extend(_pull_secrets("spec.serving", spec.serving.image_pull_secrets))
    return found


def first_missing(wanted: Sequence[Requirement], observed: Observed) -> tuple[str, str] | None:
    """The first object, or key of one, that is not there.

    Returns:
        Reason and message for a condition, or None.
    """
    for item in wanted:
        live = observed.references.get((item.kind, item.name))
        if live is None:
            return f"{item.kind}Missing", (
                f"{item.field}: {item.kind} '{item.name}' does not exist in this namespace; "
                "create it or name another one"
            )
        held = {*(live.get("data") or {}), *(live.get("binaryData") or {})}
        for key in item.keys:
            if key not in held:
                return f"{item.kind}KeyMissing", (
                    f"{item.field}: {item.kind} '{item.name}' has no key '{key}'; "
                    "add it or name another key"
                )
    return None


def _secret(field: str, ref: SecretKeyRef | None) -> Iterator[Requirement]:
    if ref is not None:
        yield Requirement(field, SECRET.kind, ref.name, (ref.key,))


def _s3(field: str, place: S3Location | None) -> Iterator[Requirement]:
    if place is not None and place.credentials_secret_ref is not None:
        name = place.credentials_secret_ref.name
        yield Requirement(f"{field}.credentialsSecretRef", SECRET.kind, name, S3_KEYS)


def _model(model: Model) -> Iterator[Requirement]:
    yield from _secret("spec.model.tokenSecretRef", model.token_secret_ref)
    if model.cache.claim_name is not None:
        yield Requirement("spec.model.cache.claimName", CLAIM.kind, model.cache.claim_name)


def _pull_secrets(field: str, refs: Sequence[SecretRef]) -> Iterator[Requirement]:
    for ref in refs:
        yield Requirement(f"{field}.imagePullSecrets", SECRET.kind, ref.name)
