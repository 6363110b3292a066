"""The key file: scopes, rotation, and what is said about a wrong one."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.server.auth.keys import LOOK_SECONDS, KeyRing, parse_keys

KEY = "k" * 20
OTHER = "o" * 20


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_key_alone_may_do_all_for_anyone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    ring = KeyRing(str(path))
    principal = ring.authenticate(KEY)
    assert principal is not None
    assert principal.may_name("anybody")
    assert principal.permissions == {"chat", "read", "write", "admin"}
    assert KEY not in principal.id
    assert ring.authenticate(OTHER) is None
    assert ring.authenticate("") is None


def test_keys_have_users_and_permissions() -> None:
    document = {
        "keys": [
            {"key": KEY, "name": "backend"},
            {
                "sha256": hashlib.sha256(OTHER.encode()).hexdigest(),
                "users": ["maya", "team-a/*"],
                "permissions": ["read"],
            },
        ]
    }
    found = dict(parse_keys(json.dumps(document).encode(), "f"))
    backend = found[hashlib.sha256(KEY.encode()).digest()]
    assert backend.may_name("anybody")
    assert backend.permissions == {"chat", "read", "write"}
    team = found[hashlib.sha256(OTHER.encode()).digest()]
    assert team.permissions == {"read"}
    assert [u for u in ("maya", "may", "mayas", "team-a/x", "team-b/x") if team.may_name(u)] == [
        "maya",
        "team-a/x",
    ]


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("", "at least 16"),
        ("short", "at least 16"),
        ("two words in a line", "printable"),
        ("{", "no JSON"),
        ({"keys": []}, "'keys'"),
        ({"keys": [{"key": "short"}]}, "'keys.0.key'"),
        ({"keys": [{"name": "x"}]}, "'keys.0'"),
        ({"keys": [{"key": KEY, "user": "x"}]}, "'keys.0.user'"),
        ({"keys": [{"key": KEY, "permissions": ["all"]}]}, "'keys.0.permissions.0'"),
        ({"keys": [{"key": KEY}, {"key": KEY}]}, "'keys.1'"),
    ],
)
def test_a_wrong_file_names_the_field_and_no_key(content: Any, field: str) -> None:
    data = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(ConfigError, match="key file 'f'") as caught:
        parse_keys(data.encode(), "f")
    assert field in str(caught.value)
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_new_file_is_followed_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text(KEY)
    ring = KeyRing(str(path), clock)

    def replace(text: str) -> None:
        fresh = tmp_path / "fresh"
        fresh.write_text(text)
        os.replace(fresh, path)
        clock.now += 2 * LOOK_SECONDS

    replace(json.dumps({"keys": [{"key": KEY}, {"key": OTHER}]}))
    assert ring.authenticate(KEY)
    assert ring.authenticate(OTHER)
    replace("{")
    assert ring.authenticate(KEY)
    path.unlink()
    clock.now += 2 * LOOK_SECONDS
    assert ring.authenticate(KEY)
    replace(OTHER)
    assert ring.authenticate(KEY) is None
    assert ring.authenticate(OTHER)


def test_no_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        KeyRing(str(tmp_path / "none"))
