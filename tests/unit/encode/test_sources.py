"""Inputs from folders, archives, HTTP and object storage; nothing cut short is taken for whole."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from inferscale_runtime.encode import sources
from inferscale_runtime.encode.input import UserInput, read_inputs
from inferscale_runtime.errors import ConfigError, InputError, SourceError

Answer = Callable[[BaseHTTPRequestHandler], None]


def body(*ids: str, user: str = "u") -> bytes:
    lines = [{"kind": "fact", "user": user, "id": i, "text": f"fact {i}"} for i in ids]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def read(*names: object, limit: int = 1 << 20, **options: Any) -> dict[str, UserInput]:
    return read_inputs([str(name) for name in names], max_bytes=limit, **options)


def ids(users: dict[str, UserInput], user: str = "u") -> list[str]:
    return [fact.id for fact in users[user].facts]


class Server:
    """An HTTP server that answers as each test says; ``requests`` keeps path and header."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.requests.append((self.path, self.headers.get("Authorization")))
                answers = outer.answers
                (answers.pop(0) if len(answers) > 1 else answers[0])(self)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.host = f"127.0.0.1:{self.http.server_address[1]}"
        self.url = f"http://{self.host}/facts.jsonl"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    waits: list[float] = []
    original = sources.open_source
    monkeypatch.setattr(
        "inferscale_runtime.encode.input.open_source",
        lambda name, authorization, limit: original(name, authorization, limit, waits.append),
    )
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def reply(data: bytes, status: int = 200, length: int | None = -1, **headers: str) -> Answer:
    """Answers; ``length`` None sends no Content-Length and closes, -1 the right one."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        if length is not None:
            handler.send_header("Content-Length", str(len(data) if length < 0 else length))
        handler.end_headers()
        handler.wfile.write(data)
        handler.close_connection = length is None or length >= 0

    return answer


def chunked(*parts: bytes, end: bool = True) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for part in parts:
            handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        if end:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    return answer


def test_several_inputs_are_one_memory(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(body("2", "3"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(body("1", "2")))
    users = read(tmp_path / "b.jsonl", tmp_path / "a.jsonl.gz")
    assert ids(users) == ["2", "3", "1"]


def test_a_fact_may_name_a_turn_of_another_file(tmp_path: Path) -> None:
    turn = {"kind": "turn", "user": "u", "id": "t", "speaker": "A", "text": "x"}
    fact = {"kind": "fact", "user": "u", "id": "f", "text": "y", "turn": "t"}
    (tmp_path / "1.jsonl").write_text(json.dumps(fact))
    (tmp_path / "2.jsonl").write_text(json.dumps(turn))
    assert read(tmp_path)["u"].facts[0].turn_id == "t"
    (tmp_path / "2.jsonl").write_text("")
    with pytest.raises(InputError, match=r"1\.jsonl:1: field 'turn'"):
        read(tmp_path)


def test_a_mounted_config_map(tmp_path: Path) -> None:
    data = tmp_path / "..2026_01_01"
    data.mkdir()
    for name in ("b.jsonl", "a.jsonl", "readme.txt"):
        (data / name).write_bytes(body(name[0]) if name != "readme.txt" else b"not an input")
    (tmp_path / "..data").symlink_to(data.name)
    for name in ("b.jsonl", "a.jsonl", "readme.txt"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    (tmp_path / ".hidden.jsonl").write_text("not an input")
    (tmp_path / "deep.jsonl").mkdir()
    assert ids(read(tmp_path)) == ["a", "b"]


def test_a_folder_without_input_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no \*\.jsonl"):
        read(tmp_path)


def test_a_local_archive_that_is_cut_changes_nothing(tmp_path: Path) -> None:
    whole = gzip.compress(body(*map(str, range(100))))
    for cut in (3, len(whole) // 2, len(whole) - 1):
        (tmp_path / "a.jsonl.gz").write_bytes(whole[:cut])
        with pytest.raises(SourceError, match="cut short or damaged"):
            read(tmp_path / "a.jsonl.gz")
    (tmp_path / "a.jsonl.gz").write_bytes(whole + b"rubbish")
    with pytest.raises(SourceError, match="cut short or damaged"):
        read(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress])
def test_the_limit_counts_unpacked_bytes_of_all_inputs(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    one, two = body("1"), body("2")
    (tmp_path / "1.jsonl").write_bytes(pack(one))
    (tmp_path / "2.jsonl").write_bytes(pack(two))
    assert ids(read(tmp_path, limit=len(one) + len(two))) == ["1", "2"]
    with pytest.raises(InputError, match=r"2\.jsonl.*encoding\.max_input_bytes"):
        read(tmp_path, limit=len(one) + len(two) - 1)


def test_one_endless_packed_line_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(b" " * (50 << 20)))
    with pytest.raises(InputError, match="larger than 1000 bytes"):
        read(tmp_path, limit=1000)


@pytest.mark.parametrize("data", [b"", b"\n", b"\n\n", b" "])
def test_almost_empty_files(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    assert read(tmp_path) == {}


@pytest.mark.parametrize(
    "answer",
    [
        reply(body("1", "2")),
        reply(gzip.compress(body("1", "2"))),
        reply(gzip.compress(body("1", "2")), Content_Encoding="gzip"),
        reply(gzip.compress(body("1", "2")), length=None),
        chunked(body("1"), body("2")),
    ],
)
def test_http(server: Server, answer: Answer) -> None:
    server.answers = [answer]
    assert ids(read(server.url)) == ["1", "2"]


@pytest.mark.parametrize(
    "answer",
    [
        reply(body("1"), length=len(body("1", "2"))),
        chunked(body("1"), end=False),
        reply(gzip.compress(body("1", "2"))[:-9], length=None),
        reply(b"", 503),
        reply(b"", 429),
    ],
)
def test_http_cut_short_or_failing_is_a_fault(server: Server, answer: Answer) -> None:
    server.answers = [answer]
    with pytest.raises(SourceError, match=r"127\.0\.0\.1:\d+/facts\.jsonl: ") as caught:
        read(server.url)
    assert "try again" in str(caught.value) or "write it again" in str(caught.value)


def test_http_tries_again(server: Server) -> None:
    server.answers = [reply(body("1"), length=500), reply(b"", 502), reply(body("1", "2"))]
    assert ids(read(server.url)) == ["1", "2"]
    assert len(server.requests) == 3


def test_http_without_a_length_is_refused(server: Server) -> None:
    server.answers = [reply(body("1"), length=None)]
    with pytest.raises(InputError, match="Content-Length"):
        read(server.url)


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_http_refusals_name_the_status_and_no_secret(
    server: Server, tmp_path: Path, status: int
) -> None:
    key = tmp_path / "key"
    key.write_text("Bearer topsecret\n")
    server.answers = [reply(b"topsecret", status)]
    url = f"http://me:hunter2@{server.host}/facts.jsonl?sig=s3cr3t#x"
    with pytest.raises(InputError) as caught:
        read(url, authorization_file=str(key))
    message = str(caught.value)
    assert f"http://{server.host}/facts.jsonl: was refused with HTTP {status}" in message
    for secret in ("topsecret", "hunter2", "me:", "s3cr3t"):
        assert secret not in message
    assert len(server.requests) == 1


def test_http_sends_the_header_to_this_server_only(server: Server, tmp_path: Path) -> None:
    other = Server()
    try:
        key = tmp_path / "key"
        key.write_text("Bearer topsecret\n")
        other.answers = [reply(body("1"))]
        elsewhere = other.url.replace("127.0.0.1", "localhost")
        server.answers = [reply(b"", 302, Location=elsewhere)]
        assert ids(read(server.url, authorization_file=str(key))) == ["1"]
        assert server.requests[0][1] == "Bearer topsecret"
        assert other.requests[0][1] is None
    finally:
        other.http.shutdown()
        other.http.server_close()


def test_http_stops_at_the_limit(server: Server) -> None:
    server.answers = [reply(body(*map(str, range(1000))))]
    with pytest.raises(InputError, match=r"encoding\.max_input_bytes"):
        read(server.url, limit=1000)


def test_http_nobody_there(server: Server) -> None:
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(SourceError, match="connection failed"):
        read(server.url)


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines", "Bearer ü".encode(), b"\xff"])
def test_a_bad_authorization_file_is_named(tmp_path: Path, content: bytes) -> None:
    key = tmp_path / "key"
    key.write_bytes(content)
    with pytest.raises(ConfigError, match="--input-authorization-file") as caught:
        read("http://127.0.0.1:1/x", authorization_file=str(key))
    assert "lines" not in str(caught.value)


def test_authorization_without_http_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no --input is an http"):
        read(tmp_path, authorization_file="key")


def memory_file(name: str, data: bytes) -> str:
    fsspec.filesystem("memory").pipe_file(f"/{name}", data)
    return f"memory://{name}"


def test_object_storage() -> None:
    assert ids(read(memory_file("in/a.jsonl", body("1")))) == ["1"]
    with pytest.raises(InputError, match=r"memory://in/none: cannot be read"):
        read("memory://in/none")
    with pytest.raises(InputError, match="nosuch://x"):
        read("nosuch://user:pw@x/y")


def test_object_storage_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    url = memory_file("in/b.jsonl", body("1", "2"))
    kind = type(fsspec.filesystem("memory"))
    whole = kind.info
    for size, error in ((len(body("1", "2")) + 5, SourceError), (None, InputError)):
        monkeypatch.setattr(
            kind, "info", lambda self, path, size=size: {**whole(self, path), "size": size}
        )
        with pytest.raises(error):
            read(url)


def test_object_storage_that_fails_shows_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    url = memory_file("in/c.jsonl", body("1"))

    def info(self: Any, path: str) -> Any:
        raise RuntimeError("signed with topsecret")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", info)
    with pytest.raises(SourceError, match="RuntimeError") as caught:
        read(url)
    assert "topsecret" not in str(caught.value)
