"""Segments of killed engines go; what anybody uses stays."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

from inferscale_runtime.server.leftovers import OLD_SECONDS, remove_leftovers

LATER = OLD_SECONDS + 5


def segment(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(bytes(mmap.PAGESIZE))
    return path


def processes(folder: Path, *pids: int) -> Path:
    """``/proc`` of these processes: the machine's own may hold some that cannot be asked."""
    root = folder / "proc"
    root.mkdir()
    for pid in (os.getpid(), *pids):
        (root / str(pid)).symlink_to(f"/proc/{pid}")
    return root


def test_what_nobody_has_mapped_goes(tmp_path: Path) -> None:
    gone, other = segment(tmp_path, "psm_0123abcd"), segment(tmp_path, "psm_of_someone")
    proc = processes(tmp_path)
    assert remove_leftovers(tmp_path, proc, time.time() + LATER) == ["psm_0123abcd"]
    assert not gone.exists()
    assert other.exists()


def test_young_ones_stay(tmp_path: Path) -> None:
    path = segment(tmp_path, "psm_0123abcd")
    assert remove_leftovers(tmp_path) == []
    assert path.exists()


def test_what_another_process_has_mapped_stays_until_it_is_killed(tmp_path: Path) -> None:
    path = segment(tmp_path, "psm_0123abcd")
    code = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'r+b') as stream:\n"
        "    kept = mmap.mmap(stream.fileno(), 0)\n"
        "print('mapped', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"mapped\n"
    later, proc = time.time() + LATER, processes(tmp_path, process.pid)
    assert remove_leftovers(tmp_path, proc, later) == []
    process.kill()
    process.wait()
    process.stdout.close()
    process.stdin.close()
    assert remove_leftovers(tmp_path, proc, later) == ["psm_0123abcd"]


def test_a_process_that_cannot_be_asked_protects_all(tmp_path: Path) -> None:
    path = segment(tmp_path, "psm_0123abcd")
    strange = tmp_path / "proc" / "17"
    strange.mkdir(parents=True)
    (strange / "maps").mkdir()  # reading it is an error other than "it has ended"
    assert remove_leftovers(tmp_path, tmp_path / "proc", time.time() + LATER) == []
    assert path.exists()
    (strange / "maps").rmdir()
    assert remove_leftovers(tmp_path, tmp_path / "proc", time.time() + LATER) == [path.name]


def test_files_of_others_stay(tmp_path: Path) -> None:
    path = segment(tmp_path, "psm_0123abcd")
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        assert remove_leftovers(tmp_path, processes(tmp_path), time.time() + LATER) == []
        assert path.exists()
