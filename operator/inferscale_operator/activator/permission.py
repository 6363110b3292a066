"""Whether a caller may wake the model. Servers that are awake check for themselves."""

from __future__ import annotations

import hmac
from collections.abc import Callable

_SCHEME = "bearer"

MayWake = Callable[[str], bool]
"""Gets the value of ``Authorization``, empty without one."""


def everybody(_: str) -> bool:
    """A model that asks for no key."""
    return True


def any_token(authorization: str) -> bool:
    """Any bearer token: only servers can check it, so this keeps mere accidents from waking one."""
    scheme, _, token = authorization.partition(" ")
    return scheme.lower() == _SCHEME and bool(token.strip())


def one_key(read: Callable[[], str | None]) -> MayWake:
    """The bearer of one key.

    Args:
        read: The key as it is now: it may be changed while this process runs. None or empty lets
            nobody in.
    """

    def may_wake(authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        key = (read() or "").strip()
        given = token.strip().encode(errors="surrogateescape")
        same = hmac.compare_digest(given, key.encode(errors="surrogateescape"))
        return bool(key) and scheme.lower() == _SCHEME and same

    return may_wake
