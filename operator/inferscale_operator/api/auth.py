"""``auth`` of a PersonalizedModel: who may call its servers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from inferscale_operator.api.base import SecretKeyRef, SecretRef
from inferscale_operator.api.rules import Rule, Struct
from inferscale_runtime.config import SigningAlgorithm


def _usual_algorithms() -> list[SigningAlgorithm]:
    return ["RS256", "ES256"]


class Jwt(Struct):
    """How JSON Web Tokens are verified."""

    rules = (
        Rule(
            cel="has(self.jwksUri) != has(self.jwksSecretRef)",
            message="set jwksUri or jwksSecretRef, one of them",
            holds=lambda self: (self.jwks_uri is None) != (self.jwks_secret_ref is None),
        ),
    )

    jwks_uri: str | None = Field(None, max_length=4096, pattern=r"^https?://[^\s@]+$")
    """Where the issuer's public keys are. Read again when a token names an unknown key."""
    jwks_secret_ref: SecretKeyRef | None = None
    """Key of a Secret with them instead, for issuers that pods cannot reach."""
    issuer: str = Field(min_length=1, max_length=1024)
    """``iss`` of the tokens."""
    audience: list[Annotated[str, StringConstraints(min_length=1, max_length=1024)]] = Field(
        min_length=1, max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    """``aud`` of the tokens must name one of these."""
    algorithms: list[SigningAlgorithm] = Field(
        default_factory=_usual_algorithms,
        min_length=1,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    """Signatures that are accepted."""
    user_claim: str = Field("sub", min_length=1, max_length=256)
    """Claim with the id of the one user whose memory a token opens."""
    scope_claim: str | None = Field(None, min_length=1, max_length=256)
    """Claim with permissions (``inferscale:chat``, ``inferscale:read``, ``inferscale:write``,
    ``inferscale:admin``). Absent: every token may chat, read and write."""
    leeway_seconds: int = Field(30, ge=0, le=600)
    """How far clocks may differ."""


class RequestLimits(Struct):
    """How often requests may come, at each replica; HTTP 429 above it."""

    key_requests_per_minute: int | None = Field(None, ge=1, le=1_000_000)
    """Of one API key or token subject; no limit when absent."""
    user_requests_per_minute: int | None = Field(None, ge=1, le=1_000_000)
    """That name one user; no limit when absent."""
    burst: int = Field(20, ge=1, le=100_000)
    """How many may come at once after a pause."""


class Auth(Struct):
    """Who may call the server, and whose memory a caller may name."""

    rules = (
        Rule(
            cel="self.mode == 'apiKey' || !has(self.secretRef)",
            message="secretRef is for mode apiKey",
            holds=lambda self: self.mode == "apiKey" or self.secret_ref is None,
        ),
        Rule(
            cel="self.mode == 'apiKey' || !has(self.keysSecretRef)",
            message="keysSecretRef is for mode apiKey",
            holds=lambda self: self.mode == "apiKey" or self.keys_secret_ref is None,
        ),
        Rule(
            cel="!(has(self.secretRef) && has(self.keysSecretRef))",
            message="set secretRef (one key) or keysSecretRef (a document with several), not both",
            holds=lambda self: self.secret_ref is None or self.keys_secret_ref is None,
        ),
        Rule(
            cel="(self.mode == 'jwt') == has(self.jwt)",
            message="jwt belongs to mode jwt: set both or neither",
            holds=lambda self: (self.mode == "jwt") == (self.jwt is not None),
        ),
    )

    mode: Literal["none", "apiKey", "jwt"] = "none"
    """``apiKey``: requests need ``Authorization: Bearer KEY``; a single key is for a trusted
    backend, which may name any user. ``jwt``: a token opens the memory of the user it names."""
    secret_ref: SecretRef | None = None
    """Secret with the key ``api-key``. Absent: the operator makes one, named after the resource."""
    keys_secret_ref: SecretKeyRef | None = None
    """Key of a Secret with a document of several API keys, their users and permissions."""
    jwt: Jwt | None = None
    """Settings of mode ``jwt``."""
    limits: RequestLimits = Field(default_factory=RequestLimits)
    """How often requests may come."""
    audit: Literal["None", "Log"] = "None"
    """``Log``: one JSON line a request in the server's log, with digests of caller and user."""
