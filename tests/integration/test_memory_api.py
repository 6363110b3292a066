"""The memory API and authentication at a real server, with a tiny random model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm
from tests.integration.chat_model import make_chat_model
from tests.integration.commands import run_cli, sample_facts
from tests.integration.memory_api_load import USER, Seen, soak
from tests.integration.served import Served, serve

from inferscale_runtime.server.auth.access import required_access
from inferscale_runtime.store.store import Store

pytestmark = pytest.mark.vllm

ALL, MAYA, PAUL = "all-" * 6, "maya-" * 5, "paul-" * 5
API = "/inferscale/v1/users"
SERVER_FLAGS = ["--", "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)]
QUESTION = "Tell me about this, please, and think of all that was said before. " * 12


@dataclass
class Setup:
    model: Path
    store: Path
    audit: Path
    flags: list[str]


@pytest.fixture(scope="module")
def setup(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("memory-api")
    model = make_chat_model(smollm2, folder)
    lines = [dict(fact, user=user) for user in ("maya", "paul") for fact in sample_facts(6)]
    lines += [dict(fact, user="gone") for fact in sample_facts(4)]
    (folder / "input.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["encode", "--input", str(folder / "input.jsonl"), "--model", str(model)]
    arguments += ["--store", str(folder / "store"), "--dtype", "float32"]
    encoded = run_cli(*arguments, "--policy", "neighbours:2")
    assert encoded.returncode == 0, encoded.stderr
    keys = [
        {"key": ALL, "permissions": ["chat", "read", "write", "admin"]},
        {"key": MAYA, "users": ["maya"]},
        {"key": PAUL, "users": ["paul"]},
    ]
    (folder / "keys.json").write_text(json.dumps({"keys": keys}))
    auth = {
        "mode": "apiKey",
        "keys_file": str(folder / "keys.json"),
        "audit": str(folder / "audit.jsonl"),
    }
    config = {"stores": [{"name": "main", "url": str(folder / "store")}], "auth": auth}
    (folder / "config.json").write_text(json.dumps(config))
    flags = ["--config", str(folder / "config.json"), *SERVER_FLAGS]
    flags += ["--enable-prompt-tokens-details"]
    return Setup(model, folder / "store", folder / "audit.jsonl", flags)


@pytest.fixture(scope="module")
def served(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with serve(setup.model, "float32", log, *setup.flags) as opened:
        yield opened


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.client.base_url, headers=bearer(ALL), timeout=120) as opened:
        yield opened


def chat(client: httpx.Client, memory: dict[str, Any] | None, key: str = ALL, **fields: Any) -> Any:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 2,
        "temperature": 0,
        **({"memory": {"explain": True, **memory}} if memory else {}),
        **fields,
    }
    answer = client.post("/v1/chat/completions", json=body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def cached(usage: Any) -> int:
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def test_every_route_but_the_open_ones_needs_a_key(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    asked = 0
    with httpx.Client(base_url=client.base_url, timeout=60) as stranger:
        for path, operations in document["paths"].items():
            for method in operations:
                url = path.replace("{user}", "maya").replace("{id}", "1")
                status = stranger.request(method.upper(), url).status_code
                access = required_access(method.upper(), url)
                if access not in ("open", "figures"):
                    assert status == 401, (method, path)
                    asked += 1
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/inferscale/v1/ready").status_code in (200, 503)
        assert "vllm:" in stranger.get("/metrics").text
        figures = stranger.get("/inferscale/v1/status").json()
        assert "tiers" in figures
        assert "users" not in figures["stores"][0]
    assert asked > 20
    assert "users" in client.get("/inferscale/v1/status").json()["stores"][0]


def test_a_key_names_its_own_user_only(client: httpx.Client) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    other = client.post(
        "/v1/chat/completions", json={**body, "memory": {"user": "paul"}}, headers=bearer(MAYA)
    )
    assert other.status_code == 403
    assert other.json()["error"]["param"] == "memory.user"
    assert client.get(f"{API}/paul/facts", headers=bearer(MAYA)).status_code == 403
    assert client.get(f"{API}/maya/facts", headers=bearer(MAYA)).status_code == 200


@pytest.mark.parametrize("mode", ["injected", "text", None])
def test_the_same_text_of_another_user_is_cold(client: httpx.Client, mode: str | None) -> None:
    """Own repetition hits the prefix cache; what another user has cached cannot be seen."""

    def ask(user: str, key: str) -> Any:
        memory = {"user": user, "k": 6, "mode": mode, "order": "stored"} if mode else None
        return chat(client, memory, key)

    maya, again, paul = ask("maya", MAYA), ask("maya", MAYA), ask("paul", PAUL)
    assert maya["prompt_tokens"] == again["prompt_tokens"] == paul["prompt_tokens"]
    if mode:
        assert maya["memory"]["mode"] == paul["memory"]["mode"] == mode
    assert cached(again) > cached(maya)
    assert cached(paul) == cached(maya)
    assert cached(ask("paul", PAUL)) == cached(again)


def test_a_write_is_in_the_next_answer_and_a_deletion_is_not(client: httpx.Client) -> None:
    fact = f"{API}/maya/facts/parrot"
    assert client.put(fact, json={"text": "Maya has a parrot."}).status_code == 201
    memory = {"user": "maya", "k": 100}
    first = chat(client, memory)["memory"]
    assert "parrot" in first["fact_ids"]
    assert first["mode"] == "injected"
    assert first["text_tokens"] > 0, "it is not encoded yet"
    assert client.put(fact, json={"text": "Maya has a blue parrot now."}).status_code == 200
    longer = chat(client, memory)["memory"]
    assert longer["text_tokens"] > first["text_tokens"]
    assert client.delete(fact).status_code == 200
    last = chat(client, memory)["memory"]
    assert "parrot" not in last["fact_ids"]
    assert last["text_tokens"] == 0
    answers = client.get(f"{API}/maya/answers").json()["answers"]
    assert [a["fact_ids"] for a in answers[:2]] == [last["fact_ids"], longer["fact_ids"]]


def test_blocks_of_before_a_deletion_are_not_hit(client: httpx.Client) -> None:
    # A question so near to some facts that the new one is none of the three best.
    asked = [{"role": "user", "content": f"{sample_facts(1)[0]['text']} " * 20}]
    memory = {"user": "paul", "k": 3, "order": "stored"}

    def ask() -> Any:
        return chat(client, memory, messages=asked)

    cold, hot = ask(), ask()
    assert cached(hot) > cached(cold)
    extra = f"{API}/paul/facts/extra"
    client.put(extra, json={"text": "Zinc melts at 419 degrees."})
    assert cached(ask()) == cached(hot), "a new fact leaves the cache alone"
    client.delete(extra)
    after = ask()
    assert after["memory"]["fact_ids"] == hot["memory"]["fact_ids"]
    assert cached(after) == cached(cold)


def test_an_erased_user_is_nowhere(client: httpx.Client, setup: Setup) -> None:
    assert chat(client, {"user": "gone", "k": 9})["memory"]["mode"] == "injected"
    receipt = client.delete(f"{API}/gone").json()
    assert receipt["files"] == len(receipt["digests"]) > 0
    assert receipt["arena_bytes"] > 0
    assert chat(client, {"user": "gone", "k": 9})["memory"]["mode"] == "none"
    assert client.get(f"{API}/gone/facts").status_code == 404
    verified = run_cli("store", "verify", str(setup.store), "--erased", "gone")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_a_path_of_a_megabyte_is_refused(served: Served) -> None:
    url = served.client.base_url
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        connection.sendall(
            b"GET " + API.encode() + b"/" + b"u" * 1_000_000 + b"/facts HTTP/1.1\r\n"
        )
        connection.sendall(b"host: x\r\nauthorization: Bearer " + ALL.encode() + b"\r\n\r\n")
        assert connection.recv(64).split()[1].startswith(b"4")


def fuzz(client: httpx.Client, tmp_path: Path, *limits: str) -> None:
    arguments = [
        str(Path(sys.executable).with_name("st")),
        "run",
        f"{client.base_url}/openapi.json",
    ]
    arguments += ["--include-path-regex", "^/inferscale/v1/users", "--seed", "1"]
    arguments += ["-H", f"Authorization: Bearer {ALL}", "--request-timeout", "60"]
    # What the document promises holds for every answer; which of its inputs are refused beyond
    # the schema (blank texts, turns that do not exist) is tested by name elsewhere.
    arguments += ["--checks", "not_a_server_error,response_schema_conformance"]
    arguments += ["--suppress-health-check", "all", "--warnings", "off", *limits]
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Tested" in done.stdout


def test_fuzz_finds_no_server_error(client: httpx.Client, tmp_path: Path) -> None:
    fuzz(client, tmp_path, "--phases", "coverage,fuzzing", "-n", "8", "--max-time", "30")


@pytest.mark.slow
def test_long_fuzz_finds_no_server_error(client: httpx.Client, tmp_path: Path) -> None:
    fuzz(client, tmp_path, "-n", "300", "--max-time", "600")


def assert_nothing_is_lost(client: httpx.Client, seen: Seen) -> None:
    assert seen.errors == []
    stored: dict[str, str] = {}
    after: str | None = None
    while True:
        params = {"limit": 1000, **({"after": after} if after else {})}
        page = client.get(f"{API}/{USER}/facts", params=params).json()
        stored |= {fact["id"]: fact["text"] for fact in page["facts"]}
        after = page["next"]
        if after is None:
            break
    assert stored == seen.acknowledged


def test_twenty_readers_and_a_writer(client: httpx.Client) -> None:
    seen = asyncio.run(soak(str(client.base_url), bearer(ALL), 30, 100, 20))
    assert_nothing_is_lost(client, seen)
    assert seen.writes == 100
    assert seen.answers >= 20
    assert client.delete(f"{API}/{USER}").status_code == 200


@pytest.mark.slow
def test_twenty_readers_and_two_thousand_writes(client: httpx.Client) -> None:
    seen = asyncio.run(soak(str(client.base_url), bearer(ALL), 300, 2000, 20))
    assert_nothing_is_lost(client, seen)
    assert seen.writes == 2000
    print(f"{seen.answers} answers")
    assert client.delete(f"{API}/{USER}").status_code == 200


def test_the_audit_log_holds_no_content(client: httpx.Client, setup: Setup) -> None:
    text = setup.audit.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {"chat.memory", "put.fact", "delete.fact"} <= {line["action"] for line in lines}
    for word in ("parrot", "Maya", "maya", "Reader", ALL, MAYA):
        assert word not in text


def test_killed_in_the_middle_of_writes_all_acknowledged_ones_are_there(
    setup: Setup, served: Served, tmp_path: Path
) -> None:
    """The last test of the module: it kills the module's server."""
    acknowledged: list[str] = []

    async def write() -> None:
        async with httpx.AsyncClient(
            base_url=served.client.base_url, headers=bearer(ALL), timeout=60
        ) as client:

            async def stream(writer: int) -> None:
                for n in range(1000):
                    name = f"{writer}-{n}"
                    path = f"{API}/kill/facts/{name}"
                    answer = await client.put(path, json={"text": f"fact {name}"})
                    assert answer.status_code == 201, answer.text
                    acknowledged.append(name)
                    if len(acknowledged) == 40:
                        os.kill(served.process.pid, signal.SIGKILL)

            await asyncio.gather(*map(stream, range(4)))

    with pytest.raises(httpx.TransportError):
        asyncio.run(write())
    served.process.wait(60)
    assert len(acknowledged) >= 40
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    with (
        issuer(key, tmp_path) as uri,
        serve(setup.model, "float32", tmp_path / "again.log", *jwt_flags(setup, uri)) as again,
    ):
        mine = token(key, "kill")
        again.client.headers.update(bearer(mine))
        page = again.client.get(f"{API}/kill/facts", params={"limit": 1000}).json()
        assert {fact["id"] for fact in page["facts"]} >= {*acknowledged}
        assert chat(again.client, {"user": "kill", "k": 5}, mine)["memory"]["facts"] == 5
        # A token opens its own user's memory; others of the key's owner do not, nor forged ones.
        assert again.client.get(f"{API}/maya/facts").status_code == 403
        forger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        for wrong in (token(key, "kill", exp=time.time() - 3600), token(forger, "kill"), ALL):
            refused = again.client.get(f"{API}/kill/facts", headers=bearer(wrong))
            assert refused.status_code == 401
            assert 'error="invalid_token"' in refused.headers["www-authenticate"]
    assert Store.open(str(setup.store)).verify("kill") == []


@contextmanager
def issuer(key: rsa.RSAPrivateKey, folder: Path) -> Iterator[str]:
    """Serves the public key as JWKS."""
    public = json.loads(RSAAlgorithm.to_jwk(key.public_key()))
    (folder / "jwks.json").write_text(json.dumps({"keys": [{**public, "kid": "a"}]}))
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/jwks.json"
        server.shutdown()


def jwt_flags(setup: Setup, uri: str) -> list[str]:
    """The flags of a server that takes tokens instead of keys."""
    path = Path(setup.flags[1])
    auth = {
        "mode": "jwt",
        "jwt": {"jwks_uri": uri, "issuer": "https://issuer", "audience": ["us"]},
    }
    changed = path.with_name("jwt.json")
    changed.write_text(json.dumps({**json.loads(path.read_text()), "auth": auth}))
    return ["--config", str(changed), *setup.flags[2:]]


def token(key: rsa.RSAPrivateKey, user: str, **claims: Any) -> str:
    body = {"iss": "https://issuer", "aud": "us", "sub": user, "exp": time.time() + 3600, **claims}
    return jwt.encode(body, key, algorithm="RS256", headers={"kid": "a"})
