"""Builds and loads the compiled writer (``native.cpp``): any failure is a reason, never a crash.

The library is built by the system's compiler on the first start and kept in the user's cache
folder, under a name that depends on the source, the compiler and the processor. Loading a library
is running code, so the folder must belong to this user and be writable by nobody else.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferscale_runtime.inject.writer import WriterUnavailableError

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-w")
BUILD_TIMEOUT_S = 120
_RTLD_NOLOAD = 4  # bits/dlfcn.h; only finds a library that the process has already

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


class Job(ctypes.Structure):
    """``struct Job`` of ``native.cpp``."""

    _fields_ = (
        ("slab", _POINTER),
        ("row_stride", _COUNT),
        ("layer_stride", _COUNT),
        ("head_stride", _COUNT),
        ("value_offset", _COUNT),
        ("kind", _COUNT),
        ("scale_offset", _COUNT),
        ("powers", _POINTER),
        ("num_heads", _COUNT),
        ("head_dim", _COUNT),
        ("rotary_dim", _COUNT),
        ("block_size", _COUNT),
        ("cos_sin", _POINTER),
        ("num_layers", _COUNT),
        ("layers", _POINTER),
        ("caches", _POINTER),
        ("block_strides", _POINTER),
        ("head_strides", _POINTER),
        ("num_tokens", _COUNT),
        ("rows", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("num_units", _COUNT),
        ("units", _POINTER),
        ("fused", _COUNT),
        ("num_threads", _COUNT),
        ("parallel", _POINTER),
        ("next", _COUNT),
    )


class NativeLibrary:
    """The loaded library.

    Args:
        path: What `build_library` returned.

    Raises:
        WriterUnavailableError: It cannot be loaded, or is of another version.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            size = library.inferscale_job_bytes
            self._write = library.inferscale_write
        except (OSError, AttributeError) as error:
            raise WriterUnavailableError(f"the built library cannot be loaded: {error}") from None
        size.restype = ctypes.c_int64
        if size() != ctypes.sizeof(Job):
            raise WriterUnavailableError("the built library has another job structure")
        self._write.argtypes = (ctypes.POINTER(Job),)
        self._write.restype = None
        self.parallel = _openmp_entry()

    def write(self, job: Job) -> None:
        """Runs a job; blocks until all is written, without the interpreter's lock."""
        self._write(ctypes.byref(job))


def _openmp_entry() -> int | None:
    """Address of ``GOMP_parallel`` of torch's own OpenMP runtime, or None.

    Its threads are the ones that vLLM has bound to cores; a runtime of our own would start others
    that compete with them.
    """
    for arguments in ((None,), ("libgomp.so.1", _RTLD_NOLOAD), ("libomp.so.5", _RTLD_NOLOAD)):
        try:
            entry: Any = ctypes.CDLL(*arguments).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(entry, _POINTER).value
    return None


def cache_folder() -> Path:
    """Where built libraries are kept: ``$XDG_CACHE_HOME/inferscale`` or ``~/.cache/inferscale``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "inferscale"


def find_compiler() -> str:
    """The C++ compiler.

    Raises:
        WriterUnavailableError: There is none.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise WriterUnavailableError("no C++ compiler was found (g++, clang++, c++ or $CXX)")


def build_library(folder: Path | None = None, compiler: str | None = None) -> Path:
    """Builds the library unless it is in the folder already.

    Args:
        folder: Where to keep it; `cache_folder` by default.
        compiler: The compiler; `find_compiler` by default.

    Returns:
        The library's path.

    Raises:
        WriterUnavailableError: It cannot be built or safely kept.
    """
    compiler = compiler or find_compiler()
    folder = folder or cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(folder)
        target = folder / f"inject-{_key(compiler)}.so"
        if not target.exists():
            _compile(compiler, target)
        return target
    except (OSError, subprocess.SubprocessError) as error:
        raise WriterUnavailableError(f"the library cannot be built: {error}") from None


def _check_private(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise WriterUnavailableError(
            f"cache folder '{folder}': it belongs to another user or others may write to it; "
            "chmod 700 it or set XDG_CACHE_HOME"
        )


def _key(compiler: str) -> str:
    version = _run((compiler, "--version"))
    parts = (SOURCE.read_bytes(), repr((FLAGS, compiler, version, _processor())).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """What decides which instructions ``-march=native`` picks."""
    wanted = ("flags", "Features", "model name")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = sorted({line for line in lines if line.startswith(wanted)})
    return "\n".join([platform.machine(), *found])


def _compile(compiler: str, target: Path) -> None:
    # Under another name first: several servers may start at once.
    descriptor, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(descriptor)
    try:
        _run((compiler, *FLAGS, "-o", name, str(SOURCE)))
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: Sequence[str]) -> str:
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise WriterUnavailableError(
            f"'{command[0]}' ended with status {result.returncode}: {lines[0][:200]}"
        )
    return result.stdout
