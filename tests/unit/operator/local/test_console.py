from __future__ import annotations

import io
import json
import shlex
from datetime import datetime
from typing import Any

import pytest

from inferscale_operator.local.console import Console, curl_line, user_of

FACTS = '{"kind": "turn"}\nnot json\n{"user": "maya"}\n{"user": "leo"}\n'


def resource(**conditions: tuple[str, str, str]) -> dict[str, Any]:
    items = [
        {"type": name, "status": status, "reason": reason, "message": message}
        for name, (status, reason, message) in conditions.items()
    ]
    metadata = {"name": "m", "namespace": "default"}
    return {"kind": "MemoryStore", "metadata": metadata, "status": {"conditions": items}}


def make(**options: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(stream, clock=lambda: datetime(2026, 1, 1, 12, 0, 5), **options), stream


def test_a_condition_is_printed_when_it_changes() -> None:
    console, stream = make()
    first = resource(Encoded=("False", "Encoding", "1 of 2"), Ready=("False", "Encoding", "1 of 2"))
    console.conditions(first)
    console.conditions(first)
    console.conditions(resource(Encoded=("True", "Done", ""), Ready=("True", "Ready", "")))
    assert stream.getvalue().splitlines() == [
        "12:00:05  MemoryStore/m  Encoded=False Encoding: 1 of 2",
        "12:00:05  MemoryStore/m  Ready=False Encoding",
        "12:00:05  MemoryStore/m  Encoded=True Done",
        "12:00:05  MemoryStore/m  Ready=True Ready",
    ]


def test_quiet_prints_readiness_only() -> None:
    console, stream = make(quiet=True)
    console.conditions(resource(Encoded=("True", "Done", ""), Ready=("True", "Ready", "")))
    console.detail("more")
    assert stream.getvalue() == "12:00:05  MemoryStore/m  Ready=True Ready\n"


@pytest.mark.parametrize(("logs", "expected"), [(True, "pod | line\n"), (False, "")])
def test_logs_have_the_name_of_the_pod(logs: bool, expected: str) -> None:
    console, stream = make(logs=logs)
    console.log("pod", "line")
    assert stream.getvalue() == expected


@pytest.mark.parametrize(
    ("data", "key", "user"),
    [
        ({"facts.jsonl": FACTS}, None, "maya"),
        ({"facts.txt": FACTS}, None, None),
        ({"facts.txt": FACTS}, "facts.txt", "maya"),
        ({}, None, None),
    ],
)
def test_a_user_of_a_config_map(data: dict[str, str], key: str | None, user: str | None) -> None:
    assert user_of({"data": data}, key) == user
    assert user_of(None, key) is None


def test_the_curl_line_is_one_for_the_shell() -> None:
    line = curl_line("chat", 8000, "o'neill", "facts", "/data/my key")
    words = shlex.split(line)
    assert words[0] == "curl"
    assert "http://127.0.0.1:8000/v1/chat/completions" in words
    assert "Authorization: Bearer $(cat '/data/my key')" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "chat"
    assert body["memory"] == {"user": "o'neill", "store": "facts"}
    assert "Authorization" not in curl_line("chat", 8000, "maya")
