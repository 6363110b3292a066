"""What the pods of `helm test` run: right answers, wrong ones, and a server that is not ready."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.integration.helm.helm_binary import CHART

SCRIPT = (CHART / "files" / "ask.py").read_text()


class Server(ThreadingHTTPServer):
    """Answers with `replies` in turn, the last one for ever; keeps what was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies: list[tuple[int, str]] = []
        self.asked: list[tuple[str, str | None, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        self.server.asked.append((self.path, self.headers.get("authorization"), body))
        replies = self.server.replies
        code, text = replies.pop(0) if len(replies) > 1 else replies[0]
        self.send_response(code)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def ask(timeout_seconds: float = 20, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PATH": os.environ["PATH"], "TIMEOUT_SECONDS": str(timeout_seconds), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def answer(content: str) -> str:
    usage = {"total_tokens": 9, "memory": {"mode": "injected"}}
    return json.dumps({"choices": [{"message": {"content": content}}], "usage": usage})


def model(server: Server) -> dict[str, str]:
    return {"MODEL": "chat", "MODEL_URL": server.url, "QUESTION": "Who am I?", "MEMORY_USER": "u"}


def test_operator_is_waited_for(server: Server) -> None:
    server.replies = [(503, "starting\n"), (200, "ok: acting\n")]
    done = ask(OPERATOR_URL=server.url)
    assert (done.returncode, done.stdout) == (0, "operator: ok: acting\n")
    assert [path for path, _, _ in server.asked] == ["/readyz", "/readyz"]


def test_model_is_asked_with_memory_and_key_and_the_answer_is_kept_back(server: Server) -> None:
    server.replies = [(200, answer("a memory"))]
    done = ask(**model(server), API_KEY="key")
    assert done.returncode == 0, done.stderr
    assert "injected" in done.stdout
    assert "a memory" not in done.stdout + done.stderr
    ((path, key, body),) = server.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer key")
    sent = json.loads(body)
    assert (sent["model"], sent["memory"]) == ("chat", {"user": "u"})
    assert sent["messages"] == [{"role": "user", "content": "Who am I?"}]


@pytest.mark.parametrize(
    ("reply", "words"),
    [((401, "no"), "status 401"), ((404, "no"), "status 404"), ((200, answer("")), "nothing")],
)
def test_refusals_and_empty_answers_fail_at_once(
    server: Server, reply: tuple[int, str], words: str
) -> None:
    server.replies = [reply]
    done = ask(**model(server))
    assert done.returncode == 1
    assert words in done.stderr
    assert len(server.asked) == 1


def test_time_ends(server: Server) -> None:
    server.replies = [(503, "no")]
    done = ask(1, OPERATOR_URL=server.url)
    assert done.returncode == 1
    assert "status 503" in done.stderr
