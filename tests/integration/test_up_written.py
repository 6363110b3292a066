"""``inferscale up`` over facts of the memory API: written, encoded, erased."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.commands import command
from tests.integration.up_command import Command

# Minutes of server starts and jobs with the real model.
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PATIENCE = 1200.0
MODEL = {"id": "builtin:smollm2-135m", "dtype": "float32"}
STORE = {
    "apiVersion": "inferscale.dev/v1alpha1",
    "kind": "MemoryStore",
    "metadata": {"name": "notes"},
    "spec": {
        "model": {**MODEL, "cache": {"size": "2Gi"}},
        "source": {"api": {"pendingSeconds": 10}},
        "storage": {"pvc": {"size": "1Gi"}},
    },
}
SERVED = {
    "apiVersion": "inferscale.dev/v1alpha1",
    "kind": "PersonalizedModel",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {**MODEL, "maxModelLen": 2048, "cache": {"size": "2Gi"}},
        "memoryStores": [{"name": "notes"}],
        "tiers": {"dram": "256Mi"},
        "serving": {"engineArgs": ["--enforce-eager", "--kv-cache-memory-bytes=536870912"]},
    },
}
REST = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "rest"}, "data": {}}
FACTS = "/inferscale/v1/users/maya/facts"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("up")
    (folder / "f.yaml").write_text(f"{json.dumps(STORE)}\n---\n{json.dumps(SERVED)}\n")
    running = Command(command("up"), folder, "--follow-logs", "--prune", patience=PATIENCE)
    yield running
    running.process.kill()
    running.process.wait()


def mode_of_an_answer(up: Command) -> str:
    answer = up.post(
        "/v1/chat/completions",
        {
            "model": "chat",
            "messages": [{"role": "user", "content": "What does Maya play?"}],
            "max_tokens": 4,
            "memory": {"user": "maya", "k": 2},
        },
    )
    memory: dict[str, Any] = answer["usage"]["memory"]
    assert memory["facts"] == 2
    return str(memory["mode"])


def put(up: Command, texts: dict[str, str]) -> None:
    facts = [{"id": i, "text": text} for i, text in texts.items()]
    written = up.post(FACTS, {"facts": facts}, method="PUT")
    assert written["created"] == [*texts]


def test_facts_are_written_encoded_and_erased(up: Command) -> None:
    put(up, {"cello": "Maya plays the cello in a quartet.", "dog": "Maya has a beagle, Biscuit."})
    assert mode_of_an_answer(up) == "text"
    up.until(lambda: mode_of_an_answer(up) == "injected", pause=2)
    put(up, {"piano": "Maya also plays the piano on Sundays."})
    up.until(lambda: all(fact["injectable"] for fact in up.get(FACTS)["facts"]), pause=2)
    assert len(up.get(FACTS)["facts"]) == 3

    files = [path for path in up.data.rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix == ".safetensors"]
    assert any(b"maya" in path.read_bytes() for path in files if path.name == "manifest.json")
    # Files without any object are refused.
    up.file.write_text(json.dumps(REST))
    up.until(lambda: any("MemoryStore/notes" in line and "deleted" in line for line in up.lines))
    up.until(lambda: not [*up.data.rglob("manifest.json"), *up.data.rglob("*.parquet")])


def test_ctrl_c_after_all_is_gone(up: Command) -> None:
    assert up.end() == 0, up.text
