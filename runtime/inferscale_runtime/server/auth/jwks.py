"""The keys that tokens are signed with, from a URL or a file.

A token with an unknown key id makes the set be read again, because its issuer may have rotated its
keys; but not more often than every ``COOLDOWN_SECONDS``, whether the last reading worked or not, so
that forged ids cost nothing. When the issuer is away, the keys that are known stay in use.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

import httpx
import jwt

from inferscale_runtime.config import JwtConfig
from inferscale_runtime.errors import ConfigError

logger = logging.getLogger("vllm.inferscale.auth")

LIFETIME_SECONDS = 300.0
"""After this the set is read again, so that a key that was taken out ends (arbitrary)."""
STALE_SECONDS = 86_400.0
"""How long a set stays in use while it cannot be read again (arbitrary)."""
COOLDOWN_SECONDS = 10.0
"""Least time between two readings (arbitrary)."""
FETCH_SECONDS = 5.0
MAX_BYTES = 1 << 20


class KeySetError(Exception):
    """The set cannot be read; the message names its place and what is wrong."""


def parse_key_set(data: bytes) -> dict[str | None, jwt.PyJWK]:
    """Reads a JWKS.

    Args:
        data: The document.

    Returns:
        Signing keys by key id; symmetric keys are left out, because a set is public.

    Raises:
        KeySetError: When it holds no usable key.
    """
    try:
        document = json.loads(data)
        entries = document["keys"]
        usable = [
            entry
            for entry in entries
            if entry.get("kty") != "oct" and entry.get("use", "sig") == "sig"
        ]
        keys = jwt.PyJWKSet.from_dict({"keys": usable}).keys
    except (jwt.PyJWTError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise KeySetError("it is no JWKS with a public signing key") from None
    return {key.key_id: key for key in keys}


class KeySet:
    """The keys in use.

    Args:
        config: Where they are.
        clock: Seconds, monotonic.
        cooldown_seconds: Least time between two readings.
    """

    def __init__(
        self,
        config: JwtConfig,
        clock: Callable[[], float] = time.monotonic,
        cooldown_seconds: float = COOLDOWN_SECONDS,
    ) -> None:
        self._place = config.jwks_uri or config.jwks_file
        self._remote = bool(config.jwks_uri)
        self._clock = clock
        self._cooldown = cooldown_seconds
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._read_at = float("-inf")
        self._tried_at = float("-inf")
        self._lock = asyncio.Lock()
        if not self._remote:
            # A wrong file is a mistake of whoever starts the server; an issuer may come up later.
            try:
                self._keys = parse_key_set(self._load_file())
            except KeySetError as error:
                raise ConfigError(f"auth.jwt.jwks_file '{self._place}': {error}") from None
            self._read_at = self._tried_at = clock()

    @property
    def available(self) -> bool:
        """There is a set that may be used."""
        return bool(self._keys) and self._clock() - self._read_at < STALE_SECONDS

    async def find(self, key_id: str | None) -> jwt.PyJWK | None:
        """The key of an id.

        Args:
            key_id: ``kid`` of a token; None is enough where the set has one key.

        Returns:
            The key, or None for an unknown id.
        """
        fresh = self._clock() - self._read_at < LIFETIME_SECONDS
        key = self._known(key_id)
        if key is None or not (fresh or self._lock.locked()):
            # Known keys serve while somebody else reads the set again.
            await self._read_again()
            key = self._known(key_id)
        return key if self.available else None

    def _known(self, key_id: str | None) -> jwt.PyJWK | None:
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(key_id) if key_id is not None else None

    async def _read_again(self) -> None:
        async with self._lock:
            now = self._clock()
            if now - self._tried_at < self._cooldown:
                return
            self._tried_at = now
            try:
                data = await (self._fetch() if self._remote else asyncio.to_thread(self._load_file))
                self._keys = parse_key_set(data)
                self._read_at = now
            except KeySetError as error:
                logger.warning("JWKS '%s': %s; the keys stay as they were", self._place, error)

    def _load_file(self) -> bytes:
        try:
            with Path(self._place).open("rb") as stream:
                return stream.read(MAX_BYTES)
        except OSError as error:
            raise KeySetError(str(error.strerror)) from None

    async def _fetch(self) -> bytes:
        try:
            # Redirects are not followed: the address is the trust.
            async with (
                httpx.AsyncClient(timeout=FETCH_SECONDS) as client,
                client.stream("GET", self._place) as answer,
            ):
                if answer.status_code != HTTPStatus.OK:
                    raise KeySetError(f"HTTP {answer.status_code}")
                data = b""
                async for part in answer.aiter_bytes():
                    data += part
                    if len(data) > MAX_BYTES:
                        raise KeySetError(f"larger than {MAX_BYTES} bytes")
                return data
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise KeySetError(type(error).__name__) from None
