"""The encoding Job of a MemoryStore with a memory tool: its own command against a tool's server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.integration.commands import run_cli
from tests.unit.importing.tool_servers import TOKEN, Mem0Server

from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.desired import paths
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.encoder import build_encode_run
from inferscale_runtime.config import QuotaConfig
from inferscale_runtime.store.living import FactWrite, put_facts
from inferscale_runtime.store.store import Store

pytestmark = pytest.mark.vllm


def job_command(url: str, model: Path, folder: Path) -> list[str]:
    """The Job's arguments, with the pod's mounts in a folder."""
    spec = MemoryStoreSpec.model_validate(
        {
            "model": {"id": "/models/x", "dtype": "float32", "cache": {"claimName": "weights"}},
            "encoding": {"policy": "none"},
            "source": {
                "mem0": {"url": url, "tokenSecretRef": {"name": "mem0", "key": "token"}},
                "refresh": "*/10 * * * *",
            },
        }
    )
    metadata = {"name": "s", "namespace": "n", "uid": "77777777-7777-7777-7777-777777777777"}
    owner = {"apiVersion": "inferscale.dev/v1alpha1", "kind": "MemoryStore", "metadata": metadata}
    config, job = build_encode_run(owner, spec, Defaults(runtime_image="i"), "0" * 32, 0)
    (folder / "config.json").write_text(config["data"]["config.json"])
    (folder / "token").write_text(TOKEN)
    mounts = {
        paths.CONFIG_FILE: str(folder / "config.json"),
        paths.SOURCE_TOKEN_FILE: str(folder / "token"),
        paths.STORE: str(folder / "store"),
        paths.REPORT: str(folder / "report.json"),
        "/models/x": str(model),
        paths.PORT_REFERENCE: "0",
        f"$({paths.INDEX_VARIABLE})/1": "0/1",
    }
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert TOKEN not in json.dumps(job)
    arguments = [mounts.get(argument, argument) for argument in container["args"]]
    return [container["command"][1], *arguments]


def facts(store: Store, user: str) -> dict[str, tuple[str, str]]:
    memory = store.read_user(user)
    assert memory is not None
    return {fact.id: (fact.text, fact.origin) for fact in memory.facts}


def test_the_job_follows_the_tool(smollm2: Path, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    own = [FactWrite("own", "Ann was born in Rome.")]
    rows = np.ones((1, 384), np.float32)
    put_facts(
        store, "ann", own, origin="api", embedder="minilm", embed=lambda texts: rows,
        limits=QuotaConfig(),
    )  # fmt: skip
    with Mem0Server() as mem0:
        for number, (user, text) in enumerate(
            (("ann", "Ann has a dog."), ("ann", "Ann likes tea."), ("ben", "Ben flies.")), start=1
        ):
            time = f"2026-01-0{number}T00:00:00+00:00"
            mem0.memories.append(
                {"id": f"m{number}", "memory": text, "user_id": user, "created_at": time}
            )
        command = job_command(mem0.url, smollm2, tmp_path)
        done = run_cli(*command)
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads((tmp_path / "report.json").read_text())
        assert (report["users"], report["facts"], report["encoded"]) == (2, 3, 4)
        assert facts(store, "ann") == {
            "m1": ("Ann has a dog.", "mem0"),
            "m2": ("Ann likes tea.", "mem0"),
            "own": ("Ann was born in Rome.", "api"),
        }
        # The dog and the whole of Ben go. Deleting needs no engine: with one byte none could start.
        del mem0.memories[2], mem0.memories[0]
        done = run_cli(*command, "--kv-cache-bytes", "1")
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads((tmp_path / "report.json").read_text())
        assert (report["encoded"], report["removed"]) == (0, 2)
        assert set(facts(store, "ann")) == {"m2", "own"}
        assert facts(store, "ben") == {}
        said = done.stdout + done.stderr
        assert TOKEN not in said
        assert "likes tea" not in said
        assert run_cli("store", "verify", str(tmp_path / "store")).returncode == 0
