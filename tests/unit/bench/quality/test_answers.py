from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from inferscale_runtime.bench.quality.answers import Judge, make_judge, token_f1
from inferscale_runtime.bench.report import BenchError
from inferscale_runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("The blue boat.", "blue boat", 1.0),
        ("It was a blue boat", "blue boat", 2 / 3),  # 2 of 4 words right, 2 of 2 found
        ("red", "blue", 0.0),
        ("", "", 1.0),
        ("", "blue", 0.0),
        ("7 May 2023", "7 May, 2023", 1.0),
    ],
)
def test_token_f1(answer: str, gold: str, expected: float) -> None:
    assert token_f1(answer, gold) == pytest.approx(expected)


class Endpoint:
    """An OpenAI-compatible endpoint that says the same to everything."""

    def __init__(self) -> None:
        self.says, self.status = "CORRECT", 200
        self.seen: list[tuple[str, str | None, dict[str, Any]]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                endpoint.seen.append((self.path, self.headers.get("authorization"), body))
                answer = {"choices": [{"message": {"content": endpoint.says}}]}
                data = json.dumps(answer).encode()
                self.send_response(endpoint.status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()
    thread = threading.Thread(target=found.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def test_the_judge_is_asked_and_understood(endpoint: Endpoint) -> None:
    judge = Judge(endpoint.url, "m", "secret")
    assert judge.right("Where?", "Oslo", "in Oslo")
    endpoint.says = " wrong."
    assert not judge.right("Where?", "Oslo", "in Rome")
    path, authorization, body = endpoint.seen[-1]
    assert (path, authorization) == ("/v1/chat/completions", "Bearer secret")
    assert body["model"] == "m"
    said = body["messages"][-1]["content"]
    assert all(part in said for part in ("Where?", "Oslo", "in Rome"))


@pytest.mark.parametrize(("says", "status"), [("maybe", 200), ("CORRECT", 500)])
def test_a_judge_that_does_not_judge(endpoint: Endpoint, says: str, status: int) -> None:
    endpoint.says, endpoint.status = says, status
    with pytest.raises(BenchError, match="judge http") as caught:
        Judge(endpoint.url, "m").right("Where?", "Oslo", "Rome")
    assert "Oslo" not in str(caught.value)


def test_options_of_the_judge(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    assert make_judge(None, None, None) is None
    assert make_judge("http://j/v1/", "m", key) == Judge("http://j/v1", "m", "secret")
    for url, model, file in (
        (None, "m", None),
        ("http://j", None, None),
        ("http://j", "m", key / "x"),
    ):
        with pytest.raises(ConfigError, match="--judge"):
            make_judge(url, model, file)
