"""Who calls, what they may do and whom they may name (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

MAX_USER_BYTES = 512
ALL_PERMISSIONS = frozenset({"chat", "read", "write", "admin"})
USER_PERMISSIONS = frozenset({"chat", "read", "write"})
"""What a caller may do whose key or token says nothing about it."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    Attributes:
        id: Names the caller in the audit log and in limits; a digest, not the key or the claim.
        permissions: Some of ``chat``, ``read``, ``write`` and ``admin``.
        users: User ids that may be named.
        prefixes: Beginnings of user ids that may be named; ``""`` is any user.
    """

    id: str
    permissions: frozenset[str]
    users: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    def may_name(self, user: str) -> bool:
        """Whether this caller may use the memory of a user."""
        return user in self.users or user.startswith(self.prefixes)


ANYONE = Principal("anyone", ALL_PERMISSIONS, prefixes=("",))
"""The caller where authentication is off."""


def split_patterns(patterns: Iterable[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Divides ``["maya", "team-a/*"]`` into exact ids and prefixes; ``*`` is any user."""
    exact = {pattern for pattern in patterns if not pattern.endswith("*")}
    prefixes = sorted({pattern[:-1] for pattern in patterns if pattern.endswith("*")})
    return frozenset(exact), tuple(prefixes)


def digest(text: str) -> str:
    """A short name for what must not be logged: a user id, a key, a subject."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def is_user_id(text: str) -> bool:
    """Whether a text can be a user id: 1 to 512 bytes of UTF-8 without NUL."""
    try:
        return 1 <= len(text.encode()) <= MAX_USER_BYTES and "\x00" not in text
    except UnicodeEncodeError:
        return False
