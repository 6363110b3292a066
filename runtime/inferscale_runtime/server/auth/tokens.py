"""JSON Web Tokens: verified by PyJWT, turned into a caller who may name one user."""

from __future__ import annotations

from typing import Any

import jwt

from inferscale_runtime.config import JwtConfig
from inferscale_runtime.server.auth.jwks import KeySet
from inferscale_runtime.server.auth.principal import (
    ALL_PERMISSIONS,
    USER_PERMISSIONS,
    Principal,
    digest,
    is_user_id,
)

MAX_TOKEN_CHARS = 16_384
SCOPE_PREFIX = "inferscale:"
"""What a permission is called in a scope claim: ``inferscale:chat``."""


class TokenError(Exception):
    """The token is not accepted; the message says why without quoting it."""


class TokenVerifier:
    """Verifies tokens.

    Args:
        config: Issuer, audience, claims and algorithms.
        keys: Its keys.
    """

    def __init__(self, config: JwtConfig, keys: KeySet) -> None:
        self._config = config
        self._keys = keys

    async def authenticate(self, token: str) -> Principal:
        """Who a token names.

        Raises:
            TokenError: When it is malformed, forged, expired or for somebody else.
        """
        if len(token) > MAX_TOKEN_CHARS:
            raise TokenError(f"longer than {MAX_TOKEN_CHARS} characters")
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise TokenError("malformed") from None
        # Before a key is looked for: 'none' and symmetric algorithms are in no allow-list.
        if header.get("alg") not in self._config.algorithms:
            raise TokenError("its algorithm is not allowed")
        key_id = header.get("kid")
        if key_id is not None and not isinstance(key_id, str):
            raise TokenError("malformed")
        key = await self._keys.find(key_id)
        if key is None:
            raise TokenError(
                "its key is unknown" if self._keys.available else "the keys cannot be read"
            )
        return principal_of_claims(self._verified(token, key), self._config)

    def _verified(self, token: str, key: jwt.PyJWK) -> dict[str, Any]:
        config = self._config
        try:
            return jwt.decode(
                token,
                key,
                algorithms=list(config.algorithms),
                audience=list(config.audience),
                issuer=config.issuer,
                leeway=config.leeway_seconds,
                options={
                    "require": ["exp", "aud", "iss", config.user_claim],
                    "enforce_minimum_key_length": True,
                },
            )
        except jwt.ExpiredSignatureError:
            raise TokenError("expired") from None
        except (jwt.ImmatureSignatureError, jwt.InvalidIssuedAtError):
            raise TokenError("not valid yet") from None
        except jwt.InvalidAudienceError:
            raise TokenError("for another audience") from None
        except jwt.InvalidIssuerError:
            raise TokenError("of another issuer") from None
        except jwt.MissingRequiredClaimError as error:
            raise TokenError(f"it has no claim '{error.claim}'") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise TokenError("its signature or form is wrong") from None


def principal_of_claims(claims: dict[str, Any], config: JwtConfig) -> Principal:
    """Who verified claims name, and what they allow (pure).

    Raises:
        TokenError: When the user's claim is no user id.
    """
    user = claims.get(config.user_claim)
    if not isinstance(user, str) or not is_user_id(user):
        raise TokenError(f"claim '{config.user_claim}' is no user id")
    permissions = USER_PERMISSIONS
    if config.scope_claim:
        scopes = claims.get(config.scope_claim, "")
        names = scopes.split() if isinstance(scopes, str) else scopes
        given = {name for name in names if isinstance(name, str)} if isinstance(names, list) else ()
        permissions = frozenset(p for p in ALL_PERMISSIONS if f"{SCOPE_PREFIX}{p}" in given)
    subject = claims.get("sub", user)
    return Principal(f"sub-{digest(f'{config.issuer} {subject}')}", permissions, frozenset({user}))
