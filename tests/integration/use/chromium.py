"""Where the browser comes from: PATH, else Debian's package, unpacked into build/tools.

Nothing is installed: the package and what it needs and this machine lacks are downloaded and
unpacked, which needs no root. Package lists that are missing or old need it, once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.kube.control_plane import ROOT

CACHE = ROOT / "build" / "tools" / "chromium"
PACKAGES = ("chromium-headless-shell", "fonts-dejavu-core")
BINARY = Path("usr/lib/chromium/chromium-headless-shell")
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Chromium:
    """A browser without windows.

    Attributes:
        path: Its executable.
        environment: What it needs beside this process's variables.
    """

    path: Path
    environment: dict[str, str]


def find_chromium() -> Chromium:
    """The browser; skips without one, loudly, and fails in CI."""
    for name in ("chromium", "chromium-headless-shell", "google-chrome"):
        found = shutil.which(name)
        if found:
            return Chromium(Path(found), {})
    if not (CACHE / BINARY).is_file():
        try:
            _unpack()
        except (OSError, subprocess.SubprocessError) as error:
            message = (
                "the web page was not tested: chromium is not on PATH, and Debian's package "
                f"{PACKAGES[0]} cannot be had: {error}"
            )
            if os.environ.get("CI"):
                pytest.fail(message)
            pytest.skip(message)
    # Not under /usr: the system's own lists of libraries and fonts do not name them.
    folders = sorted({str(file.parent) for file in (CACHE / "usr" / "lib").rglob("*.so*")})
    libraries = os.pathsep.join(folders)
    fonts = {"FONTCONFIG_FILE": str(CACHE / "fonts.conf")}
    return Chromium(CACHE / BINARY, {"LD_LIBRARY_PATH": libraries, **fonts})


def _unpack() -> None:
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as name:
        folder = Path(name)
        archives = folder / "archives"
        (archives / "partial").mkdir(parents=True)
        quiet: dict[str, Any] = {"check": True, "capture_output": True, "timeout": TIMEOUT_SECONDS}
        download = ["apt-get", "install", "--yes", "--no-install-recommends", "--download-only"]
        download += ["-o", f"Dir::Cache::archives={archives}", "-o", "Debug::NoLocking=1"]
        download += PACKAGES
        if subprocess.run(download, capture_output=True, timeout=TIMEOUT_SECONDS).returncode:
            # A fresh machine may have no package lists yet, or old ones.
            subprocess.run(["apt-get", "update"], **quiet)
            subprocess.run(download, **quiet)
        for package in archives.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(folder / "root")], **quiet)
        (folder / "root" / "fonts.conf").write_text(
            f"<fontconfig><dir>/usr/share/fonts</dir><dir>{CACHE}/usr/share/fonts</dir><cachedir>{CACHE}/cache</cachedir>"
            "</fontconfig>"
        )
        shutil.rmtree(CACHE, ignore_errors=True)
        (folder / "root").rename(CACHE)
