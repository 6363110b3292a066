"""The canary in a real server: a store with other facts' KV is caught, a good one is not."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.integration.commands import run_cli, sample_facts
from tests.integration.test_server import SERVER_FLAGS, ask, serve

from inferscale_runtime.store.store import NewSegment, Store

pytestmark = pytest.mark.vllm

WAIT_S = 400


def swap_kv(store: Store, user: str) -> None:
    """Gives each fact the KV of another one; all checksums are right."""
    memory = store.read_user(user)
    assert memory is not None
    [(fingerprint, segments)] = memory.encodings.items()
    ordered = [segments[fact.id] for fact in memory.facts]
    read = store.read_segments(user, ordered)
    wrong = []
    for place, segment in enumerate(ordered):
        other = read[(place + 7) % len(ordered)]
        assert isinstance(other, torch.Tensor)
        rows = torch.arange(segment.num_tokens) % other.shape[0]
        key = hashlib.sha256(f"wrong {segment.key}".encode()).hexdigest()
        wrong.append(
            NewSegment(
                fact_id=segment.fact_id,
                key=key,
                token_ids=segment.token_ids,
                context_fact_ids=(),
                context_turn_ids=(),
                kv=other.index_select(0, rows),
            )
        )
    store.commit_user(replace(memory, encodings={}), {fingerprint: wrong})


def encode(model: Path, folder: Path) -> Path:
    """A store with the sample's facts of one user, as the defaults encode them."""
    lines = [dict(fact, user="maya") for fact in sample_facts(20)]
    (folder / "input.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["encode", "--input", str(folder / "input.jsonl"), "--model", str(model)]
    done = run_cli(*arguments, "--store", str(folder / "store"), "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    return folder / "store"


@pytest.fixture(scope="module")
def stores(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same facts twice, one store with the KV of other facts."""
    import shutil

    folder = tmp_path_factory.mktemp("canary")
    good = encode(smollm2, folder)
    bad = folder / "bad"
    shutil.copytree(good, bad)
    swap_kv(Store.open(str(bad)), "maya")
    assert Store.open(str(bad)).verify() == [], "no checksum tells"
    return {"good": good, "bad": bad}


@pytest.fixture(scope="module")
def client(
    smollm2: Path, stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("server")
    entries = [{"name": name, "url": str(path)} for name, path in stores.items()]
    # Rechecked soon; a share of one scores every request.
    canary = {"sample": 1.0, "start_samples": 8, "recheck_seconds": 5, "kl_limit": 0.1}
    config = {"stores": entries, "canary": canary, "retrieval": {"top_k": 6}}
    (folder / "config.json").write_text(json.dumps(config))
    flags = ["--config", str(folder / "config.json"), *SERVER_FLAGS]
    with serve(smollm2, "float32", folder / "server.log", *flags) as opened:
        try:
            wait(lambda: all(c["samples"] for c in canaries(opened.client).values()))
        except AssertionError:
            lines = opened.log.read_text().splitlines()
            raise AssertionError("\n".join(x for x in lines if "GET /" not in x)[-5000:]) from None
        yield opened.client


def wait(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def canaries(client: httpx.Client) -> dict[str, Any]:
    body = client.get("/inferscale/v1/status").json()
    return {store["name"]: store["canary"] for store in body["stores"]}


def metric(client: httpx.Client, line: str) -> float:
    found = [x for x in client.get("/metrics").text.splitlines() if x.startswith(line + " ")]
    return float(found[0].split()[-1]) if found else 0.0


def test_only_the_bad_store_is_degraded_and_goes_as_text(client: httpx.Client) -> None:
    found = canaries(client)
    assert found["good"]["state"] == "ok", found
    assert found["bad"]["state"] == "degraded", found
    assert found["good"]["kl"] < 0.1 < found["bad"]["kl"]
    assert metric(client, 'inferscale_canary_degraded{store="bad"}') == 1
    assert metric(client, 'inferscale_canary_degraded{store="good"}') == 0
    assert metric(client, 'inferscale_canary_kl{store="bad"}') > 0.1
    used = {}
    for store in found:
        memory = ask(client, "Where do I work?", {"user": "maya", "store": store})["usage"][
            "memory"
        ]
        used[store] = (memory["mode"], memory["reason"])
    assert used == {"good": ("injected", None), "bad": ("text", "canary")}


def test_users_requests_are_scored_afterwards(client: httpx.Client) -> None:
    name = 'inferscale_canary_samples_total{store="good",trigger="live"}'
    before = metric(client, name)
    ask(client, "Which city do I live in?", {"user": "maya", "store": "good"})
    wait(lambda: metric(client, name) > before)
    assert canaries(client)["good"]["state"] == "ok"


def test_a_mended_store_is_trusted_again(
    client: httpx.Client, stores: dict[str, Path], smollm2: Path
) -> None:
    """Last: it changes the store. The encoder reads again what has no segment."""
    bad = Store.open(str(stores["bad"]))
    memory = bad.read_user("maya")
    assert memory is not None
    bad.commit_user(replace(memory, encodings={}), {})
    arguments = ["encode", "--input", str(stores["good"].parent / "input.jsonl")]
    arguments += ["--model", str(smollm2), "--store", str(stores["bad"]), "--dtype", "float32"]
    assert run_cli(*arguments).returncode == 0
    wait(lambda: canaries(client)["bad"]["state"] == "ok")
    memory = ask(client, "Where do I work?", {"user": "maya", "store": "bad"})["usage"]["memory"]
    assert memory["mode"] == "injected"
