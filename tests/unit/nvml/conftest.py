"""A ``libnvidia-ml.so.1`` compiled from our own C, opened by nvidia-ml-py's own ctypes code."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
SONAME = "libnvidia-ml.so.1"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler: the NVML tests need one in CI")
        pytest.skip("NO C COMPILER: the NVML tests were not run; install gcc")
    path = tmp_path_factory.mktemp("nvml") / SONAME
    command = [compiler, "-shared", "-fPIC", "-Wall", "-o", str(path), str(SOURCE)]
    subprocess.run([*command, f"-Wl,-soname,{SONAME}"], check=True)
    return path


@pytest.fixture
def fake(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Sets what the driver answers from now on; see the C file for the language."""
    state = tmp_path / "state"
    # The loader gives a name that is loaded already to whoever asks for it later, so nvidia-ml-py
    # opens this one by itself.
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    monkeypatch.setenv("FAKE_NVML_STATE", str(state))
    ctypes.CDLL(None).setenv(b"FAKE_NVML_STATE", str(state).encode(), 1)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield lambda text: state.write_text(text) and None
    while loaded.fake_open_count():
        loaded.nvmlShutdown()
