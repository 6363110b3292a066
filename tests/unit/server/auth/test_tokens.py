"""Tokens: only what the issuer signed for us, now, opens the memory of the user it names."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from inferscale_runtime.config import JwtConfig
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.server.auth.jwks import COOLDOWN_SECONDS, LIFETIME_SECONDS, KeySet
from inferscale_runtime.server.auth.principal import Principal
from inferscale_runtime.server.auth.tokens import TokenError, TokenVerifier


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def verifier(signing: SimpleNamespace, issuer: Any, clock: Clock, **fields: Any) -> TokenVerifier:
    values = {"jwks_uri": issuer.url, "issuer": signing.ISSUER, "audience": (signing.AUDIENCE,)}
    config = JwtConfig(**{**values, **fields})
    return TokenVerifier(config, KeySet(config, clock))


def accept(verifier: TokenVerifier, text: str) -> Principal:
    return asyncio.run(verifier.authenticate(text))


def refusal(verifier: TokenVerifier, text: str) -> str:
    with pytest.raises(TokenError) as caught:
        accept(verifier, text)
    return str(caught.value)


def test_a_good_token_opens_exactly_its_user(
    signing: SimpleNamespace, issuer: Any, clock: Clock
) -> None:
    issuer.document = {"keys": [signing.jwk(signing.rsa, "a"), signing.jwk(signing.ec, "e")]}
    checked = verifier(signing, issuer, clock)
    principal = accept(checked, signing.token(signing.rsa))
    assert principal.may_name("maya")
    assert principal.permissions == {"chat", "read", "write"}
    assert not principal.may_name("maya2")
    assert "maya" not in principal.id
    star = accept(checked, signing.token(signing.ec, "e", "ES256", sub="*"))
    assert not star.may_name("maya"), "a claim is no pattern"
    assert star.may_name("*")
    assert issuer.asked == 1


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"exp": time.time() - 3600}, "expired"),
        ({"exp": None}, "no claim 'exp'"),
        ({"exp": "soon"}, "form is wrong"),
        ({"nbf": time.time() + 3600}, "not valid yet"),
        ({"iat": time.time() + 3600}, "not valid yet"),
        ({"aud": "another"}, "another audience"),
        ({"aud": None}, "no claim 'aud'"),
        ({"iss": "https://evil.example"}, "another issuer"),
        ({"sub": None}, "no claim 'sub'"),
        ({"sub": ""}, "no user id"),
        ({"sub": "a\x00b"}, "no user id"),
        ({"sub": "u" * 513}, "no user id"),
        ({"sub": "\ud800"}, "no user id"),
    ],
)
def test_claims_that_are_refused(
    signing: SimpleNamespace, issuer: Any, clock: Clock, claims: dict[str, Any], why: str
) -> None:
    issuer.document = {"keys": [signing.jwk(signing.rsa, "a")]}
    checked = verifier(signing, issuer, clock)
    assert why in refusal(checked, signing.token(signing.rsa, **claims))


def test_clocks_may_differ_by_the_leeway(
    signing: SimpleNamespace, issuer: Any, clock: Clock
) -> None:
    issuer.document = {"keys": [signing.jwk(signing.rsa, "a")]}
    late = signing.token(signing.rsa, exp=time.time() - 10)
    early = signing.token(signing.rsa, nbf=time.time() + 20)
    assert accept(verifier(signing, issuer, clock), late)
    assert accept(verifier(signing, issuer, clock), early)
    strict = verifier(signing, issuer, clock, leeway_seconds=0)
    assert refusal(strict, late) == "expired"
    assert refusal(strict, early) == "not valid yet"


def test_forgeries(signing: SimpleNamespace, issuer: Any, clock: Clock) -> None:
    document = signing.jwk(signing.rsa, "a")
    issuer.document = {"keys": [document, {"kty": "oct", "kid": "s", "k": "c2VjcmV0" * 8}]}
    checked = verifier(signing, issuer, clock)
    good = signing.token(signing.rsa)
    assert "signature" in refusal(checked, signing.token(signing.other))
    # Another body under a good signature.
    head, _, sign = good.split(".")
    body = signing.token(signing.rsa, sub="admin").split(".")[1]
    assert "signature" in refusal(checked, f"{head}.{body}.{sign}")
    assert "algorithm" in refusal(checked, signing.token("", "a", "none"))
    # The public key as a shared secret; the library itself refuses to sign so.
    public = signing.rsa.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    symmetric = signing.token(b"x" * 32, "a", "HS256").rpartition(".")[0]
    code = hmac.digest(public, symmetric.encode(), "sha256")
    forged = f"{symmetric}.{base64.urlsafe_b64encode(code).rstrip(b'=').decode()}"
    assert "algorithm" in refusal(checked, forged)
    # A secret that somebody put into the set.
    assert "algorithm" in refusal(checked, signing.token(b"secret" * 8, "s", "HS256"))
    assert "algorithm" in refusal(checked, signing.token(signing.rsa, "a", "PS256"))
    for text in ("", "a.b", "a.b.c", "..", good[:-10], "x" * 20_000, good + ".e30"):
        refusal(checked, text)


def test_a_refusal_quotes_nothing(signing: SimpleNamespace, issuer: Any, clock: Clock) -> None:
    checked = verifier(signing, issuer, clock)
    text = signing.token(signing.rsa, sub="secret-user")
    assert "secret-user" not in refusal(checked, text)
    assert text.split(".")[2] not in refusal(checked, text)


def test_rotation_is_followed_but_not_asked_for_without_end(
    signing: SimpleNamespace, issuer: Any, clock: Clock
) -> None:
    issuer.document = {"keys": [signing.jwk(signing.rsa, "a")]}
    checked = verifier(signing, issuer, clock)
    accept(checked, signing.token(signing.rsa))
    issuer.document = {"keys": [signing.jwk(signing.other, "b")]}
    fresh = signing.token(signing.other, "b")
    for _ in range(5):
        assert "unknown" in refusal(checked, fresh)
    assert issuer.asked == 1
    clock.now += COOLDOWN_SECONDS + 1
    assert accept(checked, fresh)
    assert "unknown" in refusal(checked, signing.token(signing.rsa))
    assert issuer.asked == 2


def test_a_key_that_was_taken_out_ends(signing: SimpleNamespace, issuer: Any, clock: Clock) -> None:
    issuer.document = {"keys": [signing.jwk(signing.rsa, "a"), signing.jwk(signing.other, "b")]}
    checked = verifier(signing, issuer, clock)
    accept(checked, signing.token(signing.rsa))
    issuer.document = {"keys": [signing.jwk(signing.other, "b")]}
    clock.now += LIFETIME_SECONDS + 1
    assert "unknown" in refusal(checked, signing.token(signing.rsa))


@pytest.mark.parametrize("status", [500, 302])
def test_keys_outlive_an_issuer_that_is_away(
    signing: SimpleNamespace, issuer: Any, clock: Clock, status: int
) -> None:
    issuer.document = {"keys": [signing.jwk(signing.rsa, "a")]}
    checked = verifier(signing, issuer, clock)
    accept(checked, signing.token(signing.rsa))
    issuer.status = status
    clock.now += LIFETIME_SECONDS + 1
    for _ in range(5):
        assert accept(checked, signing.token(signing.rsa))
        assert "unknown" in refusal(checked, signing.token(signing.other, "b"))
    assert issuer.asked == 2, "failed readings have the same cooldown"
    clock.now += 100_000
    assert "cannot be read" in refusal(checked, signing.token(signing.rsa))


def test_scopes_become_permissions(signing: SimpleNamespace, issuer: Any, clock: Clock) -> None:
    issuer.document = {"keys": [signing.jwk(signing.rsa, "a")]}
    checked = verifier(signing, issuer, clock, scope_claim="scope")
    for scope, expected in (
        ("openid inferscale:chat inferscale:read", {"chat", "read"}),
        (["inferscale:write", 3], {"write"}),
        ("chat admin", set()),
        ({"inferscale:admin": 1}, set()),
        (None, set()),
    ):
        found = accept(checked, signing.token(signing.rsa, scope=scope))
        assert found.permissions == expected


def test_keys_of_a_file(signing: SimpleNamespace, clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [signing.jwk(signing.rsa, "a")]}))
    values = {"jwks_file": str(path), "issuer": signing.ISSUER, "audience": (signing.AUDIENCE,)}
    config = JwtConfig(**values)
    checked = TokenVerifier(config, KeySet(config, clock))
    assert accept(checked, signing.token(signing.rsa, None)), "one key needs no id"
    path.write_text(json.dumps({"keys": [signing.jwk(signing.other, "b")]}))
    clock.now += COOLDOWN_SECONDS + 1
    assert accept(checked, signing.token(signing.other, "b"))
    for content in ("", "{}", '{"keys": []}', '{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}'):
        path.write_text(content)
        with pytest.raises(ConfigError, match="jwks_file"):
            KeySet(config, clock)
