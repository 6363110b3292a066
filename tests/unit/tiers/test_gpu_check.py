"""The script of ``tests/gpu``, in small on the CPU: it runs, and it finds what is wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from inferscale_runtime.tiers.device_arena import DeviceArena

SCRIPT = Path(__file__).parents[2] / "gpu" / "check_tiers.py"


def test_it_runs_as_a_command(tmp_path: Path) -> None:
    written = tmp_path / "found.json"
    arguments = ["--device", "cpu", "--small", "--run-root", str(tmp_path), "--json", str(written)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    document = json.loads(line)
    assert document == json.loads(written.read_text())
    assert (document["device"], document["pinned"], document["ok"]) == ("cpu", False, True)
    names = [row["check"] for row in document["rows"]]
    assert [line.split("  ")[0] for line in table[2:]] == names
    assert {"compose, slab pinned", "rotate and scatter"} <= {*names}
    assert all(row["ms"] > 0 and row["bound_ms"] > 0 for row in document["rows"])
    assert list(tmp_path.iterdir()) == [written], "the slab is gone"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_tiers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "check_tiers", module)
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, tmp_path: Path) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "found.json"
    arguments = ["--device", "cpu", "--small", "--run-root", str(tmp_path), "--json", str(file)]
    return script.main(arguments), json.loads(file.read_text())


def wrong_angles(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = script.Rotary.__call__
    monkeypatch.setattr(
        script.Rotary, "__call__", lambda self, at, keys, _: rotate(self, at - 1, keys, None)
    )


def wrong_values(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(_: Any, layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        cache.flatten(1, 2)[0].index_copy_(0, slots, keys)
        cache.flatten(1, 2)[1].index_copy_(0, slots, keys)

    monkeypatch.setattr(script.Layer, "do_kv_cache_update", update)


def stray_slots(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    write = script.Layer.do_kv_cache_update

    def update(self: Any, layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        other = torch.ones(cache.shape[1] * cache.shape[2], dtype=torch.bool)
        other[slots] = False
        cache.flatten(1, 2)[:, other] = 0
        write(self, layer, keys, values, cache, slots)

    monkeypatch.setattr(script.Layer, "do_kv_cache_update", update)


def wrong_fetch(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = DeviceArena.fetch
    monkeypatch.setattr(DeviceArena, "fetch", lambda self, runs: fetch(self, runs[::-1]))


@pytest.mark.parametrize(
    ("harm", "failed", "note"),
    [
        (wrong_angles, "rotate and scatter", "keys differ"),
        (wrong_values, "rotate and scatter", "values differ"),
        (stray_slots, "rotate and scatter", "slots of others"),
        (wrong_fetch, "compose, slab pinned", "nothing is pinned"),
    ],
)
def test_what_is_wrong_is_found(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    harm: Callable[[ModuleType, pytest.MonkeyPatch], None],
    failed: str,
    note: str,
) -> None:
    harm(script, monkeypatch)
    code, document = run(script, tmp_path)
    assert (code, document["ok"]) == (1, False)
    [row] = [row for row in document["rows"] if row["check"] == failed]
    assert not row["ok"]
    assert note in row["note"]
    assert "NO" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 2
    assert "--device cpu" in capsys.readouterr().out
