"""Tables, JSON and plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferscale_runtime.bench.report import Curve, Report, check_outputs, draw, publish
from inferscale_runtime.errors import ConfigError


def make_report() -> Report:
    columns = [("k", "k"), ("text_p50_ms", "text ms"), ("gone", "gone")]
    rows = [{"k": 5, "text_p50_ms": 12.345, "extra_s": 1}, {"k": 50, "text_p50_ms": 1.0}]
    return Report("ttft", "m", 7, {"repeats": 3}, columns, rows, ["a note"])


def test_table() -> None:
    assert make_report().table().splitlines() == [
        " k  text ms  gone",
        f" 5    {12.345:.2f}     -",
        "50     1.00     -",
        "a note",
    ]


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    publish(make_report(), file)
    document = json.loads(file.read_text())
    assert list(document) == [
        "bench",
        "machine",
        "versions",
        "model",
        "seed",
        "settings",
        "rows",
        "notes",
    ]
    assert document["rows"] == make_report().rows
    assert document["seed"] == 7
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["memory_bytes"] > 1 << 28
    assert "python" in document["versions"]
    assert "a note" in capsys.readouterr().out


def test_outputs_are_checked_before_anything_runs(tmp_path: Path) -> None:
    check_outputs(tmp_path / "a.json", None)
    with pytest.raises(ConfigError, match=r"--json .* does not exist"):
        check_outputs(tmp_path / "none" / "a.json", None)
    with pytest.raises(ConfigError, match=r"must end in \.png"):
        check_outputs(None, tmp_path / "a.svg")


def test_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"inferscale\[bench\]"):
        check_outputs(None, tmp_path / "a.png")


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "a.png"
    draw(file, "title", ("x", "y"), [Curve("one", [(1, 2), (2, 3)]), Curve("two", [(1, 1)])])
    assert file.read_bytes().startswith(b"\x89PNG")
