"""Prometheus and its own tool: PATH, else Debian's package, unpacked into build/tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kube.control_plane import ROOT

CACHE = ROOT / "build" / "tools"


def find_promtool() -> Path:
    """Path of promtool; skips without one, loudly, and fails in CI."""
    return find("promtool")


def find(name: str) -> Path:
    """Path of a program of the package; skips without one, loudly, and fails in CI."""
    found = shutil.which(name)
    if found:
        return Path(found)
    if not (CACHE / name).is_file():
        try:
            _unpack()
        except (OSError, subprocess.SubprocessError) as error:
            message = (
                f"alerts and dashboard were not evaluated: {name} is not on PATH, and Debian's "
                f"package prometheus cannot be had: {error}"
            )
            if os.environ.get("CI"):
                pytest.fail(message)
            pytest.skip(message)
    return CACHE / name


def _unpack() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        folder = Path(name)
        quiet: dict[str, Any] = {"check": True, "capture_output": True, "timeout": 300}
        download = ["apt-get", "download", "prometheus"]
        if subprocess.run(download, cwd=folder, capture_output=True, timeout=300).returncode:
            # A fresh machine may have no package lists yet, or old ones.
            subprocess.run(["apt-get", "update"], **quiet)
            subprocess.run(download, cwd=folder, **quiet)
        (package,) = folder.glob("*.deb")
        subprocess.run(["dpkg", "-x", str(package), str(folder / "root")], **quiet)
        for program in ("promtool", "prometheus"):
            (folder / "root" / "usr" / "bin" / program).rename(CACHE / program)


def check_rules(tool: Path, groups: dict[str, Any], folder: Path) -> str:
    """Output of ``promtool check rules``."""
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump(groups))
    return _run(tool, "check", "rules", str(file))


def evaluate(tool: Path, groups: dict[str, Any], tests: list[dict[str, Any]], folder: Path) -> str:
    """Output of ``promtool test rules``; an assertion error with what differed."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(groups))
    file = folder / "tests.yaml"
    text = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(text, sort_keys=False))
    return _run(tool, "test", "rules", str(file))


def _run(tool: Path, *arguments: str) -> str:
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
