"""Decides about each request: who calls, whether the call is allowed, and how often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from http import HTTPStatus

from fastapi import Request

from inferscale_runtime.config import AuthConfig
from inferscale_runtime.connector.capability import cache_salt
from inferscale_runtime.server.auth.access import Access
from inferscale_runtime.server.auth.audit import AuditLog, AuditRecord
from inferscale_runtime.server.auth.jwks import KeySet
from inferscale_runtime.server.auth.keys import KeyRing
from inferscale_runtime.server.auth.limits import TokenBuckets
from inferscale_runtime.server.auth.principal import ANYONE, Principal
from inferscale_runtime.server.auth.tokens import TokenError, TokenVerifier
from inferscale_runtime.server.refusal import Refusal

REALM = 'Bearer realm="inferscale"'


class Gate:
    """One for each server.

    Args:
        config: ``auth`` of the settings.
        secret: The server's; keys the salts of requests without memory.

    Raises:
        ConfigError: For a key file or audit file that cannot be used.
    """

    def __init__(self, config: AuthConfig, secret: bytes) -> None:
        self._secret = secret
        self._keys = KeyRing(config.keys_file) if config.mode == "apiKey" else None
        self._tokens = TokenVerifier(config.jwt, KeySet(config.jwt)) if config.jwt else None
        limits = config.limits
        self._by_key = _buckets(limits.key_requests_per_minute, limits.burst)
        self._by_user = _buckets(limits.user_requests_per_minute, limits.burst)
        self.audit = AuditLog(config.audit) if config.audit else None

    async def authenticate(self, headers: Sequence[str]) -> Principal:
        """Who calls.

        Args:
            headers: The values of ``Authorization``.

        Raises:
            Refusal: 401 without valid credentials.
        """
        if self._keys is None and self._tokens is None:
            return ANYONE
        what = "an API key" if self._keys else "a token"
        scheme, _, credentials = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
        credentials = credentials.strip()
        if scheme.lower() != "bearer" or not credentials:
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                f"header 'Authorization': {what} is needed; send 'Authorization: Bearer ...' once",
                headers={"www-authenticate": REALM},
            )
        if self._keys is not None:
            principal = self._keys.authenticate(credentials)
            if principal is None:
                raise _invalid("the API key is not known; ask the operator of the server for one")
            return principal
        assert self._tokens is not None
        try:
            return await self._tokens.authenticate(credentials)
        except TokenError as error:
            raise _invalid(f"the token is not accepted: {error}; get a new one") from None

    def admit(self, principal: Principal, access: Access) -> None:
        """Lets a request of a caller in.

        Raises:
            Refusal: 403 without the permission, 429 above the limit.
        """
        if access not in ("open", "figures", "known") and access not in principal.permissions:
            raise _forbidden(f"header 'Authorization': it lacks the permission '{access}'")
        if self._by_key is not None and principal is not ANYONE:
            _wait(self._by_key.take(principal.id), "header 'Authorization'", None)

    def admit_user(self, principal: Principal, user: str, param: str) -> None:
        """Lets a caller use the memory of a user.

        Args:
            principal: The caller.
            user: Whom it names.
            param: The field that names the user.

        Raises:
            Refusal: 403 for somebody else's memory, 429 above the user's limit.
        """
        if not principal.may_name(user):
            raise _forbidden(
                f"field '{param}': these credentials may not use this user's memory", param
            )
        if self._by_user is not None:
            _wait(self._by_user.take(user), f"field '{param}'", param)

    def salt(self, principal: Principal) -> str | None:
        """Salt of a caller's requests without memory, so that callers share no prefix-cache block.

        Returns:
            None where callers are not told apart.
        """
        if principal is ANYONE:
            return None
        return cache_salt(self._secret, "caller", principal.id, "", (), "plain", 0)


def admit_user(request: Request, user: str, param: str) -> None:
    """Lets the caller of a request use the memory of a user; see :meth:`Gate.admit_user`."""
    record: AuditRecord = request.state.audit
    record.user = user
    gate: Gate = request.app.state.inferscale_gate
    gate.admit_user(request.state.principal, user, param)


def _buckets(per_minute: int | None, burst: int) -> TokenBuckets | None:
    return TokenBuckets(per_minute, burst) if per_minute is not None else None


def _wait(seconds: float, what: str, param: str | None) -> None:
    if seconds > 0:
        raise Refusal(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"{what}: too many requests; wait as long as 'Retry-After' says",
            param,
            {"retry-after": str(math.ceil(seconds))},
        )


def _invalid(message: str) -> Refusal:
    headers = {"www-authenticate": f'{REALM}, error="invalid_token"'}
    return Refusal(HTTPStatus.UNAUTHORIZED, f"header 'Authorization': {message}", headers=headers)


def _forbidden(message: str, param: str | None = None) -> Refusal:
    headers = {"www-authenticate": f'{REALM}, error="insufficient_scope"'}
    return Refusal(HTTPStatus.FORBIDDEN, message, param, headers)
