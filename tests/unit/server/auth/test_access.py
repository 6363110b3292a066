"""What each route needs."""

from __future__ import annotations

import pytest

from inferscale_runtime.server.auth.access import required_access

FACTS = "/inferscale/v1/users/maya/facts"


@pytest.mark.parametrize(
    ("method", "path", "access"),
    [
        ("GET", "/health", "open"),
        ("GET", "/metrics", "open"),
        ("GET", "/inferscale/v1/ready", "open"),
        ("GET", "/inferscale/ui", "open"),
        ("GET", "/inferscale/ui/page.js", "open"),
        ("GET", "/inferscale/v1/status", "figures"),
        ("GET", "/openapi.json", "known"),
        ("POST", "/v1/chat/completions", "chat"),
        ("POST", "/v1/completions", "chat"),
        ("GET", "/v1/models", "chat"),
        ("GET", FACTS, "read"),
        ("HEAD", FACTS, "read"),
        ("POST", "/inferscale/v1/users/maya/search", "read"),
        ("PUT", FACTS, "write"),
        ("POST", FACTS, "write"),
        ("DELETE", "/inferscale/v1/users/search", "write"),
        # Whatever is not known, and what only looks like an open route.
        ("POST", "/reset_prefix_cache", "admin"),
        ("POST", "/v1/load_lora_adapter", "admin"),
        ("POST", "/inference/v1/generate", "admin"),
        ("WEBSOCKET", "/v1/realtime", "admin"),
        ("GET", "/health/", "admin"),
        ("GET", "//health", "admin"),
        ("GET", "/metrics/../v1/models", "admin"),
        ("GET", "/inferscale/uix", "admin"),
    ],
)
def test_route(method: str, path: str, access: str) -> None:
    assert required_access(method, path) == access
