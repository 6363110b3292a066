"""The kernel's script of ``tests/gpu``, in small in the interpreter: it runs, and finds faults."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "gpu" / "check_kernel.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_kernel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "check_kernel", module)
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, tmp_path: Path) -> tuple[int, list[dict[str, Any]]]:
    file = tmp_path / "found.json"
    code = script.main(["--device", "cpu", "--small", "--json", str(file)])
    return code, json.loads(file.read_text())["rows"]


def test_all_kinds_of_rows_are_right(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(script.__dict__, "KINDS", ("auto", "int8"))
    code, rows = run(script, tmp_path)
    assert code == 0
    assert [(row["rows"], row["writer"], row["ok"]) for row in rows] == [
        ("auto", "triton", True),
        ("int8", "triton", True),
    ]


def test_a_wrong_byte_is_found(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        def write(self, layers: Any, placements: Any) -> None:
            layers[0].module.kv_cache.zero_()

    monkeypatch.setitem(script.__dict__, "KINDS", ("auto",))
    monkeypatch.setitem(
        script.__dict__,
        "choose_writer",
        lambda *args, **kwargs: type(
            "Choice", (), {"name": "triton", "reason": "", "open": lambda *_: Wrong()}
        )(),
    )
    code, rows = run(script, tmp_path)
    assert code == 1
    assert "bytes differ" in rows[0]["note"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 2
    assert "--device cpu" in capsys.readouterr().out
