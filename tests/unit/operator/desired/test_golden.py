"""Whole manifests against files, so that a change shows as a readable diff.

Written anew with ``INFERSCALE_UPDATE_GOLDEN=1 pytest tests/unit/operator/desired/test_golden.py``;
read the diff before committing it: it is what existing installations will apply.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

GOLDEN = Path(__file__).parent / "golden"
CASES = Path(__file__).parent / "cases"


class _Dumper(yaml.SafeDumper):
    """Long texts as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if value.count("\n") > 1 else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _dump(manifests: list[dict[str, Any]]) -> str:
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=1000)


def test_manifests_are_those_of_the_file(
    case_name: str, case: dict[str, Any], build: Callable[..., list[dict[str, Any]]]
) -> None:
    path = GOLDEN / f"{case_name}.yaml"
    text = _dump(build(case))
    if os.environ.get("INFERSCALE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_every_file_has_its_case() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {path.name for path in CASES.iterdir()}


def test_same_input_gives_same_bytes_and_input_is_left_alone(
    case: dict[str, Any], build: Callable[..., list[dict[str, Any]]]
) -> None:
    before = copy.deepcopy(case)
    assert _dump(build(case)) == _dump(build(copy.deepcopy(case)))
    assert case == before
