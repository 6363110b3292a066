"""Patience with a tool, and errors that say what to mend and give nothing away."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.importing.tool_servers import TOKEN, ZepServer, cut, not_json, status

from inferscale_runtime.errors import ConfigError, InferScaleError, SourceError
from inferscale_runtime.importing.client import ATTEMPTS, Token, ToolClient, read_token

PATH = "/api/v4/users/list"


@pytest.fixture
def server() -> Iterator[ZepServer]:
    with ZepServer() as server:
        yield server


class Waits(list[float]):
    """Stands for ``sleep``: keeps how long was waited."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def client(url: str, waits: Waits, token: str = TOKEN) -> ToolClient:
    secret = Token(token, "--token-file 'key'")
    header = {"header": "Authorization", "scheme": "Api-Key "}
    return ToolClient("zep", url, **header, token=secret, sleep=waits)


def test_faults_are_tried_again_with_growing_pauses(server: ZepServer) -> None:
    waits = Waits()
    server.misbehave = [status(500), cut, status(503), status(408)]
    with client(server.url, waits) as zep:
        assert zep.post(PATH, {}) == {"items": [], "total_size": 0}
    assert waits == [1, 2, 4, 8]
    assert len(server.requests) == 5


def test_it_slows_down_as_long_as_the_tool_says(server: ZepServer) -> None:
    waits = Waits()
    date = email.utils.formatdate(time.time() + 60, usegmt=True)
    server.misbehave = [status(429, Retry_After="7"), status(429, Retry_After=date), status(429)]
    server.misbehave += [status(429, Retry_After="0.5")] * ATTEMPTS
    with client(server.url, waits) as zep:
        zep.post(PATH, {})
    assert waits[0] == 7
    assert 50 < waits[1] <= 60
    assert waits[2] == 8
    # Being told to wait is no fault, so it may be told more often than a fault may happen.
    assert waits[3:] == [0.5] * ATTEMPTS


def test_a_wait_that_looks_like_a_hang_is_an_error(server: ZepServer) -> None:
    server.misbehave = [status(429, Retry_After="3600")]
    with client(server.url, Waits()) as zep, pytest.raises(SourceError, match="wait 3600 s"):
        zep.post(PATH, {})


@pytest.mark.parametrize("fault", [status(502), cut, status(429, Retry_After="0")])
def test_patience_ends(server: ZepServer, fault: object) -> None:
    server.misbehave = [fault] * 100  # type: ignore[list-item]
    with client(server.url, Waits()) as zep, pytest.raises(SourceError) as caught:
        zep.post(PATH, {})
    assert f"zep: POST {server.url}{PATH}: " in str(caught.value)
    assert "run the same command again" in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (status(401), "--token-file 'key' is not accepted"),
        (status(403), "--token-file 'key' is not accepted"),
        (status(302, Location="http://elsewhere.example/"), "the URL leads elsewhere"),
        (status(404), "check the URL"),
        (status(400), "HTTP 400"),
        (not_json, "is not JSON"),
    ],
)
def test_a_refusal_says_what_to_mend_and_nothing_else(
    server: ZepServer, answer: object, words: str
) -> None:
    server.misbehave = [answer]  # type: ignore[list-item]
    with client(server.url, Waits()) as zep, pytest.raises(ConfigError) as caught:
        zep.post(PATH, {}, {"cursor": "s3cret-cursor"})
    message = str(caught.value)
    assert words in message
    for secret in (TOKEN, "private words", "s3cret-cursor", "elsewhere.example"):
        assert secret not in message
    assert len(server.requests) == 1


def test_a_missing_token_is_named(server: ZepServer) -> None:
    with client(server.url, Waits(), token="") as zep, pytest.raises(ConfigError) as caught:
        zep.post(PATH, {})
    assert "is empty, and a token is needed" in str(caught.value)


def test_nobody_there() -> None:
    with ZepServer() as gone:
        url = gone.url
    with client(url, Waits()) as zep, pytest.raises(SourceError, match="connection failed"):
        zep.post(PATH, {})


@pytest.mark.parametrize("url", ["ftp://h", "http://", "h/x", "http://h/?key=a"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"http\(s\)://HOST"):
        client(url, Waits())


def test_credentials_do_not_belong_into_the_url() -> None:
    with pytest.raises(ConfigError) as caught:
        client("https://me:hunter2@h/", Waits())
    assert "hunter2" not in str(caught.value)


def test_a_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEP_API_KEY", f"{TOKEN}\n")
    assert read_token(None, "--token-file", "ZEP_API_KEY").value == TOKEN
    key = tmp_path / "key"
    key.write_text(f"{TOKEN}2\n")
    found = read_token(str(key), "--token-file", "ZEP_API_KEY")
    assert found.value == f"{TOKEN}2"
    assert TOKEN not in repr(found)
    for content in (b"", b"two\nlines", "kürz".encode(), b"\xff"):
        key.write_bytes(content)
        with pytest.raises(InferScaleError, match="--token-file"):
            read_token(str(key), "--token-file", "ZEP_API_KEY")
    with pytest.raises(ConfigError, match="No such file"):
        read_token(str(tmp_path / "none"), "--token-file", "ZEP_API_KEY")
