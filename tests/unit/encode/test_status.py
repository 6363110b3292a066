"""What a running job shows."""

from __future__ import annotations

import io
import socket
from typing import Any

import httpx
import pytest

from inferscale_runtime.encode import status
from inferscale_runtime.encode.status import EncodeStatus, ProgressLines, StatusServer
from inferscale_runtime.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def running(clock: Clock) -> EncodeStatus:
    status = EncodeStatus("1/4", clock)
    clock.now += 5
    status.enter("encoding", fingerprint="ab" * 32, users=2, facts=7, pending=4)
    clock.now += 10
    status.add(30)
    status.add(50)
    return status


def test_json_from_the_first_moment_to_the_middle() -> None:
    clock = Clock()
    status = EncodeStatus("1/4", clock)
    server = StatusServer(status, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.port}/inferscale/v1/status"
        first = httpx.get(url).json()
        assert (first["state"], first["fingerprint"], first["facts"]) == ("loading", None, 0)
        assert httpx.get(f"http://127.0.0.1:{server.port}/other").status_code == 404
    finally:
        server.close()
    server = StatusServer(running(clock), "127.0.0.1", 0)
    try:
        body = httpx.get(f"http://127.0.0.1:{server.port}/inferscale/v1/status").json()
    finally:
        server.close()
    assert body.pop("version")
    assert body == {
        "state": "encoding",
        "shard": "1/4",
        "users": 2,
        "facts": 7,
        "encoded": 2,
        "pending": 2,
        "tokens": 80,
        "tokens_per_second": 8.0,
        "seconds": 15.0,
        "fingerprint": "ab" * 32,
    }


def test_metrics() -> None:
    server = StatusServer(running(Clock()), "127.0.0.1", 0)
    try:
        text = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
    finally:
        server.close()
    for line in (
        "inferscale_encode_users 2.0",
        "inferscale_encode_facts 7.0",
        "inferscale_encode_encoded_facts_total 2.0",
        "inferscale_encode_pending_facts 2.0",
        "inferscale_encode_tokens_total 80.0",
        "inferscale_encode_tokens_per_second 8.0",
        'inferscale_encode_state{state="encoding"} 1.0',
        'inferscale_encode_state{state="loading"} 0.0',
    ):
        assert f"\n{line}\n" in text, line


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6() -> None:
    try:
        server = StatusServer(EncodeStatus(), "::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    try:
        assert httpx.get(f"http://[::1]:{server.port}/inferscale/v1/status").status_code == 200
    finally:
        server.close()


@pytest.mark.parametrize(("error", "shown"), [(BrokenPipeError, False), (KeyError, True)])
def test_a_client_that_leaves_is_no_news(
    error: type[Exception],
    shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(_: object) -> bytes:
        raise error

    monkeypatch.setattr(status, "generate_latest", fail)
    server = StatusServer(EncodeStatus(), "127.0.0.1", 0)
    # The server closes the connection when it has dealt with the error.
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{server.port}/metrics", trust_env=False)
    server.close()
    assert ("Traceback" in capfd.readouterr().err) is shown


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--status-port {port}.*in use"):
            StatusServer(EncodeStatus(), "127.0.0.1", port)
    with pytest.raises(ConfigError, match="--status-port 99999"):
        StatusServer(EncodeStatus(), "127.0.0.1", 99999)


def test_a_log_gets_whole_lines_and_few() -> None:
    clock, stream = Clock(), io.StringIO()
    status = running(clock)
    lines = ProgressLines(status, stream, clock)
    lines.start(4)
    for seconds in (1, 8, 0.5, 0.5, 3, 9):  # the fourth step is the tenth second
        clock.now += seconds
        lines.step()
    lines.stop()
    assert stream.getvalue().count("\n") == 2
    assert "\r" not in stream.getvalue()
    assert stream.getvalue().startswith("encode: 2 of 4 facts read, 4 tokens/s, ")


def test_a_terminal_gets_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream: Any = Terminal()
    lines = ProgressLines(running(Clock()), stream)
    lines.start(4)
    lines.step()
    lines.stop()
    assert "1/4" in stream.getvalue()
