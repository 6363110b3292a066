"""Rules of the repository that no other tool keeps."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscale_runtime import __version__

ROOT = Path(__file__).resolve().parents[3]
MAX_LINES = 400


def _sources(folder: str) -> Iterator[Path]:
    return (ROOT / folder).rglob("*.py")


@pytest.mark.parametrize("folder", ["operator", "runtime"])
def test_plain_folders_hold_no_modules(folder: str) -> None:
    # An __init__.py in operator/ would shadow the standard library at the repository's root.
    assert list((ROOT / folder).glob("*.py")) == []


@pytest.mark.parametrize("folder", ["operator", "runtime"])
def test_files_stay_short(folder: str) -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in _sources(folder)
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_runtime_is_found() -> None:
    assert any(_sources("runtime")), "the rules above would pass on nothing"


@pytest.mark.parametrize("folder", ["operator", "runtime"])
def test_no_top_level_package_is_named_like_the_standard_library(folder: str) -> None:
    names = {path.stem for path in (ROOT / folder).glob("*")}
    assert names & sys.stdlib_module_names == set()


@pytest.mark.parametrize("folder", ["operator", "runtime"])
def test_no_module_is_named_like_the_standard_library(folder: str) -> None:
    names = {path.stem: path for path in _sources(folder)}
    assert {str(names[n]) for n in names.keys() & sys.stdlib_module_names} == set()


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, flags=re.MULTILINE)
    assert released, "CHANGELOG.md names no release"
    assert released[0] == __version__ == project["version"]
