"""Processes that are killed leave nothing behind after the next start, and a live one keeps all.

The processes are small ones without an engine; their files, maps and locks are the real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferscale_runtime.server.cli import STARTING_S, make_run_dir

# As `inferscale serve`: the process makes the folder and becomes the server. With FORK a child of
# the server has its lock too.
SERVER = """
import os, sys
from pathlib import Path
from inferscale_runtime.server.cli import make_run_dir
folder = make_run_dir(Path(sys.argv[1]))
if sys.argv[2] == "FORK" and os.fork() == 0:
    os.write(1, b"child\\n")
    os.read(0, 1)
    os._exit(0)
if sys.argv[2] in ("BARE", "FORK"):
    os.write(1, f"folder {folder}\\n".encode())  # whole lines: two processes write here
    os.read(0, 1)
else:
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], str(folder)])
"""
ARENA = """
import sys
from pathlib import Path
import torch
from inferscale_runtime.tiers import slab
from inferscale_runtime.tiers.arena import Arena
folder = Path(sys.argv[1])
shape = slab.SlabShape(64, 1, 1, 64, "float32")
slab.create_run_files(folder, shape)
memory = slab.map_slab(folder, shape)
arena = Arena(memory, slab.map_leases(folder), stamps=slab.map_stamps(folder, shape))
assert arena.put("a", torch.full((64, 1, 2, 1, 64), 3.0))
lease = arena.acquire(["a"])
print("folder", folder, flush=True)
for _ in sys.stdin:
    print("sum", int(memory.sum()), flush=True)
"""
WORKER = """
import sys
from pathlib import Path
import torch
from inferscale_runtime.tiers import slab
from inferscale_runtime.tiers.device_arena import DeviceArena
from inferscale_runtime.tiers.device_tier import DeviceTier
folder = Path(sys.argv[1])
shape = slab.load_shape(folder)
memory, stamps = slab.map_slab(folder, shape), slab.map_stamps(folder, shape)
arena = DeviceArena(memory, stamps, slice(0, 1), 1 << 20, torch.device("cpu"))
tier = DeviceTier(arena, folder, 0)
tier.fetch([(0, 64)])
tier.keep()
print("ready", flush=True)
for _ in sys.stdin:
    print("sum", int(memory.sum()), flush=True)
"""
TOTAL = 64 * 2 * 64 * 3


class Process:
    """A process that answers by lines."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> tuple[str, str]:
        assert self.process.stdout is not None
        name, _, value = self.process.stdout.readline().strip().partition(" ")
        return name, value

    def sum(self) -> int:
        """What it sees in the slab."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        name, value = self.read()
        assert name == "sum"
        return int(value)

    def maps(self) -> list[str]:
        """Files that it shares with others and may write to."""
        lines = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        found = [line.split(None, 5) for line in lines]
        return [parts[5] for parts in found if parts[1] == "rw-s" and len(parts) == 6]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Process] = []

    def make(script: str, *arguments: str) -> Process:
        started.append(Process(script, *arguments))
        return started[-1]

    yield make
    for one in started:
        one.kill()
        for pipe in (one.process.stdin, one.process.stdout):
            assert pipe is not None
            pipe.close()


def serve(start: Start, root: Path, mode: str = ARENA) -> tuple[Process, Path]:
    server = start(SERVER, str(root), mode)
    name, folder = server.read()
    assert name == "folder"
    return server, Path(folder)


def everything(root: Path) -> set[Path]:
    return {*root.rglob("*"), *root.glob(".*")}


def next_start(root: Path) -> set[Path]:
    """Starts another server and returns what lies in the folder beside its own files."""
    own = make_run_dir(root)
    return everything(root) - {own, own / "lock"}


def test_a_killed_server_leaves_nothing_and_its_worker_is_not_hurt(
    start: Start, tmp_path: Path
) -> None:
    server, folder = serve(start, tmp_path)
    worker = start(WORKER, str(folder))
    assert worker.read() == ("ready", "")
    for one in (server, worker):
        shared = one.maps()
        assert str(folder / "slab") in shared
        assert all(path.startswith(str(folder)) for path in shared), "no shared memory elsewhere"
    assert (folder / "device-0.json").exists()
    server.kill()
    assert next_start(tmp_path) == set()
    # The worker ends a moment later in reality; until then its memory must stay readable.
    assert worker.sum() == TOTAL
    worker.kill()


def test_a_killed_worker_takes_nothing_from_the_server(start: Start, tmp_path: Path) -> None:
    server, folder = serve(start, tmp_path)
    worker = start(WORKER, str(folder))
    assert worker.read() == ("ready", "")
    before = everything(tmp_path)
    worker.kill()
    assert next_start(tmp_path) == before, "the live server keeps its files"
    assert server.sum() == TOTAL
    again = start(WORKER, str(folder))
    assert again.read() == ("ready", ""), "a new worker maps the same slab"
    assert again.sum() == TOTAL
    assert next_start(tmp_path) >= before
    for one in (again, server):
        one.kill()
    left = next_start(tmp_path)
    assert not left & before
    assert not any(path.name in ("slab", "leases", "stamps", "secret") for path in left)


def test_a_child_that_has_the_lock_keeps_the_folder_until_it_ends(
    start: Start, tmp_path: Path
) -> None:
    server = start(SERVER, str(tmp_path), "FORK")
    lines = [server.read() for _ in range(2)]
    told = dict(lines)
    assert "folder" in told, lines
    folder = Path(told["folder"])
    server.kill()
    assert folder in next_start(tmp_path)
    assert server.process.stdin is not None
    server.process.stdin.close()  # the child reads its end and goes
    end = time.monotonic() + 20
    while folder in next_start(tmp_path):
        assert time.monotonic() < end, "the child has gone, its folder has not"
        time.sleep(0.05)


def test_many_starts_at_once_keep_their_folders(start: Start, tmp_path: Path) -> None:
    gone, dead = serve(start, tmp_path, "BARE")
    gone.kill()
    starting = [start(SERVER, str(tmp_path), "BARE") for _ in range(8)]
    folders = {Path(server.read()[1]) for server in starting}
    assert len(folders) == 8
    assert {*tmp_path.iterdir()} == folders, "all live ones, and not the dead one"
    assert not dead.exists()
    for server in starting:
        server.kill()
    assert next_start(tmp_path) == set()


def test_a_start_that_was_killed_at_once_is_removed_when_it_is_old(tmp_path: Path) -> None:
    old, new, held = (tmp_path / f".inferscale-{name}" for name in ("old", "new", "held"))
    for folder in (old, new):
        folder.mkdir()
        (folder / "lock").touch()
    make_run_dir(tmp_path).rename(held)
    past = time.time() - STARTING_S - 1
    for folder in (old, held):
        os.utime(folder, (past, past))
    left = next_start(tmp_path)
    assert old not in left
    assert {new, held} <= left, "it may be starting, or holds its lock"


def test_folders_of_others_stay(tmp_path: Path) -> None:
    for name in ("inferscale-up-0-abc", "something"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    before = everything(tmp_path)
    assert next_start(tmp_path) == before
