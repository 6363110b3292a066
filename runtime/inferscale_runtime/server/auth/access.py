"""Which permission a route needs (pure).

A route that is not known here needs ``admin``: vLLM may bring new ones.
"""

from __future__ import annotations

from typing import Literal

Access = Literal["open", "figures", "known", "chat", "read", "write", "admin"]
"""``open``: nobody is asked. ``figures``: without credentials, only what the metrics show too.
``known``: any authenticated caller. The others are permissions."""

OPEN = frozenset({"/health", "/metrics", "/metrics/", "/inferscale/v1/ready"})
PAGE = "/inferscale/ui"
"""The page itself holds no data; it asks its reader for a key."""
STATUS = "/inferscale/v1/status"
USERS = "/inferscale/v1/users/"
SALTED = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
    }
)
"""Routes that fill vLLM's prefix cache, and take a ``cache_salt`` in their body."""
_KNOWN = frozenset({"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", "/version"})
_CHAT = SALTED | {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}


def required_access(method: str, path: str) -> Access:
    """What a request needs.

    Args:
        method: HTTP method in capitals; ``WEBSOCKET`` for a websocket.
        path: Decoded path below the server's root.
    """
    if path in OPEN or path == PAGE or path.startswith(f"{PAGE}/"):
        return "open"
    if path == STATUS:
        return "figures"
    if path in _KNOWN:
        return "known"
    if path.startswith(USERS):
        reads = method in ("GET", "HEAD") or (method == "POST" and path.endswith("/search"))
        return "read" if reads else "write"
    if path in _CHAT or path == "/v1/models" or path.startswith(("/v1/models/", "/v1/responses/")):
        return "chat"
    return "admin"
