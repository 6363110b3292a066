"""Mem0's own library with a local vector store: what is written there is what is read here."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from tests.unit.importing.tool_servers import TOKEN, ToolServer

from inferscale_runtime import cli

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mem0") is None and not os.environ.get("CI"),
    reason="mem0ai is not installed: pip install 'inferscale[mem0]'",
)


@contextmanager
def application(config: Path) -> Iterator[Any]:
    """Mem0 as an application has it open; a local Qdrant folder has one owner at a time."""
    from mem0 import Memory

    memory = Memory.from_config(yaml.safe_load(config.read_text()))
    yield memory
    memory.close()
    memory.vector_store.client.close()


def add(memory: Any, text: str, **more: str) -> str:
    return str(memory.add(text, infer=False, **more)["results"][0]["id"])


class Embedder(ToolServer):
    """An embedding endpoint, so that the test needs no model."""

    scheme = "Bearer "

    def routes(self) -> list[web.RouteDef]:
        async def embeddings(request: web.Request) -> web.Response:
            given = (await request.json())["input"]
            texts = [given] if isinstance(given, str) else given
            rows = [
                {"object": "embedding", "index": n, "embedding": [1.0, len(text), 0.5, 0.25]}
                for n, text in enumerate(texts)
            ]
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            return web.json_response({"object": "list", "model": "m", "data": rows, "usage": usage})

        return [web.post("/v1/embeddings", embeddings)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Both are read when the library is imported.
    monkeypatch.setenv("MEM0_DIR", str(tmp_path / "m"))
    monkeypatch.setenv("MEM0_TELEMETRY", "False")
    qdrant = {"path": str(tmp_path / "qdrant"), "embedding_model_dims": 4, "on_disk": True}
    path = tmp_path / "mem0.yaml"
    with Embedder() as embedder:
        openai = {"api_key": TOKEN, "openai_base_url": f"{embedder.url}/v1", "embedding_dims": 4}
        settings = {
            "embedder": {"provider": "openai", "config": openai | {"model": "m"}},
            "vector_store": {"provider": "qdrant", "config": qdrant},
            "llm": {"provider": "openai", "config": {"api_key": TOKEN}},
            "history_db_path": str(tmp_path / "history.db"),
        }
        path.write_text(yaml.safe_dump(settings))
        yield path


def lines(folder: Path) -> dict[str, dict[str, str]]:
    """User -> fact id -> text; only of users that are named."""
    found: dict[str, dict[str, str]] = {}
    for file in folder.glob("*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            facts = found.setdefault(line["user"], {})
            if line["kind"] == "fact":
                assert line["origin"] == "mem0"
                assert line["time"].startswith("20")
                facts[line["id"]] = line["text"]
    return found


def test_the_library_and_the_folder_say_the_same(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with application(config) as memory:
        dog = add(memory, "Ann has a dog.", user_id="ann")
        tea = add(memory, "Ann likes tea.", user_id="ann")
        flies = add(memory, "Ben flies.", user_id="ben")
        add(memory, "Long ago.", user_id="ben", expiration_date="2001-01-01")
        add(memory, "The helper is polite.", agent_id="helper")
    folder, report = tmp_path / "out", tmp_path / "report.json"
    command = ["import", "mem0", str(config), "--out", str(folder), "--json", str(report)]
    assert cli.main(command) == 0
    assert lines(folder) == {
        "ann": {dog: "Ann has a dog.", tea: "Ann likes tea."},
        "ben": {flies: "Ben flies."},
    }
    assert json.loads(report.read_text())["skipped"] == {"memory of no user": 1}

    with application(config) as memory:
        memory.update(dog, data="Ann has two dogs.")
        memory.delete(tea)
        memory.delete_all(user_id="ben")
        sings = add(memory, "Cleo sings.", user_id="cleo")
        # While the application has the folder open, nothing is changed.
        assert cli.main(command) == 1
        assert "one process only" in capsys.readouterr().err
    assert cli.main(command) == 0
    assert lines(folder) == {
        "ann": {dog: "Ann has two dogs."},
        "ben": {},
        "cleo": {sings: "Cleo sings."},
    }
    facts = json.loads(report.read_text())["facts"]
    assert facts == {"created": 1, "updated": 1, "deleted": 2, "unchanged": 0}
    assert TOKEN not in "".join(capsys.readouterr())
