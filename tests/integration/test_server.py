"""The real server, in vLLM's ordinary process split, against text prefill of the same tokens."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.commands import run_cli, sample_facts
from tests.integration.otlp import Collector, Span, running_collector
from tests.integration.served import serve

from inferscale_runtime.encode.changes import merge_memory
from inferscale_runtime.store.store import Store

pytestmark = pytest.mark.vllm

NUM_FACTS = 20
QUESTIONS = [
    "What is my dog called?",
    "What am I allergic to?",
    "Where do I work?",
    "What instrument do I play?",
    "Who is my brother?",
    "Which city do I live in?",
    "What car do I drive?",
    "What did I study?",
    "Where did I travel last?",
    "What do my parents do?",
    "When is my dentist appointment?",
    "Which book do I like?",
    "What is my favourite food?",
    "Who is my best friend?",
    "What sport do I do?",
    "How do I get to work?",
    "What do I collect?",
    "When is the wedding?",
    "What happened to my phone?",
    "Tell me one thing about me.",
]
SERVER_FLAGS = ["--", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 30)]


def write_input(path: Path) -> None:
    facts = sample_facts(NUM_FACTS)
    lines = [dict(fact, user="exact") for fact in facts]
    for user in ("damaged", "missing", "changing"):
        lines += [dict(fact, user=user) for fact in facts[:4]]
    # Both twins own the last fact; what was read before it differs.
    lines += [dict(fact, user="twin-a") for fact in (facts[0], facts[9])]
    lines += [dict(fact, user="twin-b") for fact in (facts[5], facts[6], facts[9])]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def store(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encode")
    write_input(folder / "input.jsonl")
    arguments = ["encode", "--input", str(folder / "input.jsonl"), "--model", str(smollm2)]
    arguments += ["--store", str(folder / "store"), "--dtype", "float32", "--policy", "all"]
    first = run_cli(*arguments)
    assert first.returncode == 0, first.stderr
    # The whole of a second run: nothing is read again.
    second = run_cli(*arguments)
    assert second.returncode == 0, second.stderr
    assert ": 0 encoded" in second.stdout
    opened = Store.open(str(folder / "store"))
    missing = opened.read_user("missing")
    assert missing is not None
    opened.commit_user(replace(missing, encodings={}), {})
    flip_kv_bytes(folder / "store", "damaged")
    return folder / "store"


def flip_kv_bytes(store: Path, user: str) -> None:
    for manifest in store.glob("users/*/manifest.json"):
        if json.loads(manifest.read_text())["user"] == user:
            for path in manifest.parent.glob("kv-*.safetensors"):
                data = bytearray(path.read_bytes())
                for offset in range(len(data) // 2, len(data), 4096):
                    data[offset] ^= 0xFF
                # The first segments lie in the first half: damage those too.
                for offset in range(8192, len(data) // 2, 4096):
                    data[offset] ^= 0xFF
                path.write_bytes(bytes(data))
            return
    raise AssertionError(user)


@pytest.fixture(scope="module")
def later(store: Path) -> Path:
    """Where the second store will be; a test makes it."""
    return store.parent / "later"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def client(
    smollm2: Path,
    store: Path,
    later: Path,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("server")
    pin = Store.open(str(store)).fingerprints()[0]
    stores = [
        {"name": "main", "url": str(store)},
        {"name": "later", "url": str(later), "expected_fingerprint": pin},
    ]
    (folder / "config.json").write_text(json.dumps({"stores": stores}))
    flags = ["--config", str(folder / "config.json"), *SERVER_FLAGS]
    flags += ["--otlp-traces-endpoint", collector.endpoint]
    log, environment = folder / "server.log", collector.environment
    with serve(smollm2, "float32", log, *flags, environment=environment) as opened:
        yield opened.client


def ask(client: httpx.Client, question: str, memory: dict[str, Any], **fields: Any) -> Any:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
        "memory": memory,
        **fields,
    }
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def tokens(answer: Any) -> list[str]:
    return [item["token"] for item in answer["choices"][0]["logprobs"]["content"]]


def first_logprobs(answer: Any) -> dict[str, float]:
    first = answer["choices"][0]["logprobs"]["content"][0]
    return {item["token"]: item["logprob"] for item in first["top_logprobs"]}


def both_modes(client: httpx.Client, question: str, user: str) -> tuple[Any, Any]:
    memory = {"user": user, "k": 100, "order": "stored"}
    injected = ask(client, question, {**memory, "mode": "injected"})
    text = ask(client, question, {**memory, "mode": "text"})
    assert injected["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"]
    return injected, text


def assert_equal_answers(injected: Any, text: Any) -> None:
    assert tokens(injected) == tokens(text)
    left, right = first_logprobs(injected), first_logprobs(text)
    assert left.keys() == right.keys()
    for token, value in left.items():
        assert value == pytest.approx(right[token], abs=1e-3)


def metric(client: httpx.Client, name: str) -> float:
    text = client.get("/metrics").text
    found = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[0]) if found else 0.0


def wait_for_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + 90
    while True:
        answer = client.get("/inferscale/v1/ready")
        if answer.status_code == 200:
            assert answer.json() == {"ready": True, "reason": None}
            return
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.2)


def test_ready_when_the_pinned_store_is_there(
    client: httpx.Client, store: Path, later: Path
) -> None:
    answer = client.get("/inferscale/v1/ready")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "reason": "store 'later': store_unreadable"}
    # The other store is served meanwhile.
    memory = ask(client, "Hi", {"user": "twin-a", "k": 2}, max_tokens=1)["usage"]["memory"]
    assert (memory["mode"], memory["store"]) == ("injected", "main")
    requests = metric(client, 'inferscale_requests_total{mode="injected",reason=""}')
    name = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="smollm2"}'
    finished = metric(client, name)
    shutil.copytree(store, store.parent / "copy")
    copy = Store.open(str(store.parent / "copy"))
    for user in list(copy.users()):
        if user not in ("exact", "twin-b"):
            copy.remove_user(user)
    (store.parent / "copy").rename(later)
    wait_for_ready(client)
    # A real request went through the engine and counts as nobody's.
    assert metric(client, 'inferscale_requests_total{mode="injected",reason=""}') == requests
    assert metric(client, name) == finished + 1
    status = client.get("/inferscale/v1/status").json()
    assert status["ready"] is True
    assert [(each["name"], each["reason"]) for each in status["stores"]] == [
        ("main", None),
        ("later", None),
    ]
    assert status["stores"][1]["fingerprint"] == status["stores"][1]["expected_fingerprint"]
    # What was preloaded is served out of memory at once.
    memory = ask(client, "Hi", {"user": "exact", "k": 20, "store": "later"})["usage"]["memory"]
    assert (memory["mode"], memory["tier"], memory["store"]) == ("injected", "dram", "later")


def test_each_store_is_exact_and_apart(client: httpx.Client) -> None:
    memory = {"user": "exact", "k": 100, "order": "stored"}
    for name in ("main", "later", "main"):
        injected = ask(client, QUESTIONS[1], {**memory, "store": name})
        text = ask(client, QUESTIONS[1], {**memory, "store": name, "mode": "text"})
        assert injected["usage"]["memory"]["mode"] == "injected"
        assert injected["usage"]["memory"]["store"] == name
        assert_equal_answers(injected, text)
    assert ask(client, "Hi", {"user": "twin-a", "store": "later"})["usage"]["memory"]["mode"] == (
        "none"
    )
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}]}
    answer = client.post(
        "/v1/chat/completions", json={**body, "memory": {"user": "exact", "store": "nope"}}
    )
    assert answer.status_code == 404
    assert "main, later" in answer.json()["error"]["message"]


@pytest.mark.parametrize("question", QUESTIONS)
def test_injection_equals_full_prefill(client: httpx.Client, question: str) -> None:
    injected, text = both_modes(client, question, "exact")
    assert injected["usage"]["memory"]["mode"] == "injected"
    assert injected["usage"]["memory"]["facts"] == NUM_FACTS
    assert injected["usage"]["memory"]["text_tokens"] == 0
    assert text["usage"]["memory"]["mode"] == "text"
    assert text["usage"]["memory"]["injected_tokens"] == 0
    assert_equal_answers(injected, text)


def test_another_context_is_not_exact(client: httpx.Client) -> None:
    """Shows that the exactness test can fail: facts out of their encoded order differ."""
    memory = {"user": "exact", "k": 20, "order": "relevance"}
    injected = ask(client, QUESTIONS[0], {**memory, "mode": "injected"})
    text = ask(client, QUESTIONS[0], {**memory, "mode": "text"})
    left, right = first_logprobs(injected), first_logprobs(text)
    assert any(abs(value - right.get(token, -99.0)) > 1e-3 for token, value in left.items())


@pytest.mark.parametrize("user", ["twin-a", "twin-b"])
def test_twins_with_the_same_fact_do_not_mix(client: httpx.Client, user: str) -> None:
    for _ in range(2):  # the second time out of the prefix cache
        assert_equal_answers(*both_modes(client, "Tell me about this.", user))


def test_damaged_segments_go_as_text(client: httpx.Client) -> None:
    name = 'inferscale_requests_total{mode="text",reason="segment_damaged"}'
    before = metric(client, name)
    injected, text = both_modes(client, "What do you know?", "damaged")
    memory = injected["usage"]["memory"]
    assert (memory["mode"], memory["reason"]) == ("text", "segment_damaged")
    assert tokens(injected) == tokens(text)
    assert metric(client, name) == before + 1


def test_missing_segments_go_as_text(client: httpx.Client) -> None:
    injected, text = both_modes(client, "What do you know?", "missing")
    memory = injected["usage"]["memory"]
    assert (memory["mode"], memory["reason"]) == ("text", "segment_missing")
    assert memory["facts"] == 4
    assert tokens(injected) == tokens(text)


def test_link_tail_is_exact_too(client: httpx.Client) -> None:
    memory = {"user": "exact", "k": 100, "order": "stored"}
    linked = ask(client, QUESTIONS[3], {**memory, "link_tail": 3})
    text = ask(client, QUESTIONS[3], {**memory, "mode": "text"})
    assert linked["usage"]["memory"]["text_tokens"] > 0
    assert_equal_answers(linked, text)


def test_changed_fact_is_used_at_once(client: httpx.Client, store: Path) -> None:
    opened = Store.open(str(store))
    old = opened.read_user("changing")
    assert old is not None
    first = ask(client, "Hello", {"user": "changing", "k": 4})["usage"]["memory"]
    assert first["mode"] == "injected"
    facts = (
        old.facts[0],
        replace(old.facts[1], text="Maya now has a parrot called Zebedee that she taught to sing."),
        *old.facts[2:],
    )
    merged, todo = merge_memory("changing", old, facts, old.turns, old.embedder)
    assert todo == [1]
    opened.commit_user(merged, {})
    injected, text = both_modes(client, "What is my parrot called?", "changing")
    memory = injected["usage"]["memory"]
    assert memory["store_version"] == first["store_version"] + 1
    # The changed fact and the two that had it in their context go as text.
    assert memory["mode"] == "injected"
    assert memory["reason"] == "segment_missing"
    assert 0 < memory["injected_tokens"] < first["injected_tokens"]
    assert_equal_answers(injected, text)


def test_no_facts_no_memory(client: httpx.Client) -> None:
    assert ask(client, "Hi", {"user": "nobody"})["usage"]["memory"]["mode"] == "none"
    assert ask(client, "Hi", {"user": "exact", "k": 0})["usage"]["memory"]["mode"] == "none"


def test_streaming_and_abort_release_the_arena(client: httpx.Client) -> None:
    pinned = metric(client, "inferscale_dram_arena_pinned_bytes")
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "max_tokens": 500,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "memory": {"user": "exact", "k": 20},
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert json.loads(response.headers["x-inferscale-memory"])["mode"] == "injected"
        next(line for line in response.iter_lines() if '"content"' in line)
        assert metric(client, "inferscale_dram_arena_pinned_bytes") > pinned
    deadline = time.monotonic() + 60
    while metric(client, "inferscale_dram_arena_pinned_bytes") > pinned:
        assert time.monotonic() < deadline, "an aborted request kept its segments pinned"
        # Ended leases are collected when the arena is next used.
        ask(client, "Hi", {"user": "twin-a", "k": 1}, max_tokens=1)
    body["max_tokens"] = 3
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [json.loads(x[6:]) for x in response.iter_lines() if x.startswith("data: {")]
    usage = [line["usage"] for line in lines if line.get("usage")]
    assert usage[-1]["memory"]["mode"] == "injected"


def _eventually_traced(collector: Collector, trace: str, names: set[str]) -> dict[str, Span]:
    deadline = time.monotonic() + 30
    while True:
        spans = {span.name: span for span in collector.of_trace(trace)}
        if names <= spans.keys():
            return spans
        assert time.monotonic() < deadline, sorted(spans)
        time.sleep(0.05)


def test_one_trace_from_http_to_injection(client: httpx.Client, collector: Collector) -> None:
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is my dog called?"}],
        "max_tokens": 2,
        # Not in vLLM's own prefix cache: some of it has to be injected.
        "memory": {"user": "exact", "k": 3, "order": "relevance"},
    }
    answer = client.post(
        "/v1/chat/completions", json=body, headers={"traceparent": f"00-{trace}-{caller}-01"}
    )
    assert answer.json()["usage"]["memory"]["mode"] == "injected"
    ours = {"memory.open", "memory.retrieve", "memory.plan", "memory.stage", "inject.load"}
    request = "POST /v1/chat/completions"
    spans = _eventually_traced(collector, trace, {*ours, request, "llm_request"})
    assert spans[request].parent == caller
    parents = {name: request for name in (*ours, "llm_request")} | {"memory.stage": "memory.plan"}
    for name, parent in parents.items():
        assert spans[name].parent == spans[parent].id, name
    # The context crossed over to the engine's process.
    assert spans["inject.load"].process != spans[request].process
    assert spans[request].attributes["inferscale.mode"] == "injected"
    assert spans[request].attributes["http.response.status_code"] == "200"
    assert int(spans["inject.load"].attributes["inferscale.tokens"]) > 0
    facts = [fact["text"] for fact in sample_facts(NUM_FACTS)]
    for secret in (*facts, "my dog", "exact"):
        assert not any(secret.encode() in sent for sent in collector.bodies), secret


@pytest.mark.parametrize("stream", [False, True])
def test_time_to_first_token_is_told_by_mode(client: httpx.Client, stream: bool) -> None:
    def read(mode: str) -> tuple[float, float]:
        name = "inferscale_time_to_first_token_seconds"
        labels = f'{{mode="{mode}"}}'
        return metric(client, f"{name}_count{labels}"), metric(client, f"{name}_sum{labels}")

    body: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 8,
        "ignore_eos": True,
        "stream": stream,
    }
    for mode, user in (("injected", "exact"), ("text", "exact"), ("none", "nobody")):
        (count, total), began = read(mode), time.monotonic()
        memory = {"user": user, "k": 5, **({"mode": mode} if mode != "none" else {})}
        answer = client.post("/v1/chat/completions", json={**body, "memory": memory})
        seconds = time.monotonic() - began
        assert answer.status_code == 200
        assert read(mode)[0] == count + 1
        assert 0 < read(mode)[1] - total < seconds


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"memory": {"user": "exact", "k": -1}}, "memory.k"),
        ({"memory": {"user": "exact", "k": "many"}}, "memory.k"),
        ({"memory": {"k": 3}}, "memory.user"),
        ({"memory": {"user": "exact", "colour": 1}}, "memory.colour"),
        ({"kv_transfer_params": {"inferscale": {"n": 3}}}, "kv_transfer_params"),
        ({"cache_salt": "guess"}, "cache_salt"),
        ({"memory": {"user": "exact"}, "echo": True}, "echo"),
    ],
)
def test_bad_input_names_the_field(client: httpx.Client, fields: Any, param: str) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    response = client.post("/v1/chat/completions", json={**body, **fields})
    assert response.status_code == 400
    assert param in response.text
    other = client.post("/v1/completions", json={"model": "smollm2", "prompt": "Hi", **fields})
    if "memory" not in fields:
        assert other.status_code == 400
    assert client.get("/health").status_code == 200


def test_too_long_prompt_is_refused_and_releases(client: httpx.Client) -> None:
    pinned = metric(client, "inferscale_dram_arena_pinned_bytes")
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "word " * 9000}],
        "max_tokens": 1,
        "memory": {"user": "exact", "k": 5},
    }
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    ask(client, "Hi", {"user": "twin-a", "k": 1}, max_tokens=1)
    assert metric(client, "inferscale_dram_arena_pinned_bytes") == pinned


def test_other_fingerprint_goes_as_text_and_sigterm_cuts_no_answer(
    smollm2: Path, store: Path, tmp_path: Path
) -> None:
    flags = ["--store", str(store), *SERVER_FLAGS, "--shutdown-timeout", "60"]
    with serve(smollm2, "bfloat16", tmp_path / "server.log", *flags) as served:
        client = served.client
        answer = ask(client, "Hi", {"user": "twin-a", "k": 2}, max_tokens=2)
        memory = answer["usage"]["memory"]
        assert (memory["mode"], memory["reason"]) == ("text", "fingerprint_mismatch")
        assert memory["facts"] == 2
        ready = client.get("/inferscale/v1/ready")
        assert ready.status_code == 503
        assert ready.json()["reason"] == "store 'default': fingerprint_mismatch"
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "Tell me a long story."}],
            "max_tokens": 150,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "memory": {"user": "twin-a", "k": 2},
        }
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(line for line in lines if '"content":"' in line)
            served.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        chunks = [json.loads(line[6:]) for line in rest[:-1]]
        assert [c["usage"]["completion_tokens"] for c in chunks if c.get("usage")][-1] == 150
        assert [x["finish_reason"] for c in chunks for x in c["choices"]][-1] == "length"
        served.process.wait(60)
