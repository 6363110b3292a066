"""docs/metrics.md says what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import metric_registries as registries
import pytest

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
_VLLM_ENDINGS = re.compile(r"_total$")


def rows(section: str) -> list[list[str]]:
    """Cells of the table of a section."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize(
    ("section", "real"),
    [
        ("Operator", registries.operator),
        ("Server", registries.server),
        ("Activator", registries.activator),
        ("Encoder", registries.encoder),
    ],
)
def test_page_lists_every_metric(section: str, real: registries.Registry) -> None:
    listed = [
        registries.Metric(name.strip("`"), kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, _, labels, _ in _five(rows(section))
    ]
    assert len(listed) == len(set(listed))
    assert set(listed) == real()


@pytest.mark.parametrize("section", ["Operator", "Server", "Activator", "Encoder"])
def test_units_and_meanings_are_given(section: str) -> None:
    for name, kind, unit, _, meaning in _five(rows(section)):
        assert unit, name
        assert meaning, name
        if name.strip("`").removesuffix("_total").endswith(("_seconds", "_bytes")):
            assert {"seconds": "seconds", "bytes": "bytes", "Unix time": "seconds"}[unit] in name
        assert (kind == "counter") == name.strip("`").endswith("_total")


def _five(table: list[list[str]]) -> list[list[str]]:
    # An empty cell of labels is "| |", which leaves no text between the bars.
    found = []
    for cells in table:
        flat = [cell.strip() for cell in "|".join(cells).split("|")]
        assert len(flat) == 5, flat
        found.append(flat)
    return found


def test_names_of_vllm_are_those_of_the_version_in_use() -> None:
    names = registries.vllm()
    if names is None:
        pytest.skip("vLLM is not installed: its metric names were not compared")
    listed = [cells[0].strip("`") for cells in rows("vLLM")]
    assert len(listed) > 5
    for name in listed:
        assert _VLLM_ENDINGS.sub("", name) in names
