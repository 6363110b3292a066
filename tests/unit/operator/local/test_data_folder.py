from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferscale_operator.local.data_folder import DataFolder
from inferscale_runtime.budget import ConfigError

HOLDER = """
import signal, sys, time
from pathlib import Path
from inferscale_operator.local.data_folder import DataFolder
DataFolder(Path(sys.argv[1])).lock()
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("locked", flush=True)
time.sleep(600)
"""


def hold(path: Path, how: str = "") -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), how], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    return holder


def test_one_process_at_a_time_and_the_other_is_named(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        folder = DataFolder(tmp_path)
        assert folder.running() == holder.pid
        with pytest.raises(ConfigError, match=f"process {holder.pid} runs here"):
            folder.lock()
        assert folder.stop(30) == holder.pid
        holder.wait()
        assert folder.running() is None
        folder.lock()
        folder.unlock()
    finally:
        holder.kill()
        holder.wait()


def test_a_process_that_does_not_end_is_named(tmp_path: Path) -> None:
    holder = hold(tmp_path, "deaf")
    try:
        with pytest.raises(ConfigError, match=f"process {holder.pid} has not ended"):
            DataFolder(tmp_path).stop(0)
    finally:
        holder.kill()
        holder.wait()


def test_the_lock_of_a_dead_process_does_not_count(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    holder.kill()
    holder.wait()
    folder = DataFolder(tmp_path)
    assert folder.running() is None
    assert folder.stop(0) is None
    folder.lock()
    assert int((tmp_path / "up.pid").read_text()) == os.getpid()
    folder.unlock()


def test_nothing_runs_on_a_folder_that_is_not_there(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "none")
    assert folder.stop(0) is None
    folder.remove()
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--data-dir"):
        DataFolder(tmp_path / "file" / "data").lock()


def test_only_what_up_has_made_is_removed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    folder = DataFolder(data)
    folder.lock()
    (data / "volumes/default/c").mkdir(parents=True)
    (data / "volumes/default/c/file").write_text("x")
    (data / "volumes/default").chmod(0o500)
    (data / "mine.txt").write_text("mine")
    folder.unlock()
    folder.remove()
    assert [path.name for path in data.iterdir()] == ["mine.txt"]
    (data / "mine.txt").unlink()
    folder.lock()
    folder.unlock()
    folder.remove()
    assert not data.exists()
