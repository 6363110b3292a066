"""Shared memory that a killed engine left behind.

vLLM's message queues are Python ``SharedMemory`` segments, files named ``psm_*`` on the tmpfs.
Their makers remove them at an orderly end; after a kill they stay, and a pod's ``/dev/shm``
outlives its containers.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
OLD_SECONDS = 60.0
"""Younger files are left alone: their maker may not have mapped them yet (arbitrary)."""
_NAME = re.compile(r"psm_[0-9a-f]{8}")


def remove_leftovers(
    folder: Path = SHARED_MEMORY, processes: Path = Path("/proc"), now: float | None = None
) -> list[str]:
    """Removes segments of this user that no process has mapped.

    Args:
        folder: Where the segments lie.
        processes: ``/proc``.
        now: Seconds since the epoch; the clock when None.

    Returns:
        Names of what was removed; empty when the processes of this user cannot all be looked at.
    """
    moment = time.time() if now is None else now
    old = []
    for path in folder.glob("psm_*"):
        try:
            status = path.stat()
        except OSError:
            continue
        mine = status.st_uid == os.geteuid() and moment - status.st_mtime > OLD_SECONDS
        if mine and _NAME.fullmatch(path.name):
            old.append(path)
    if not old:
        return []
    mapped = _mapped_files(processes)
    if mapped is None:
        return []
    removed = []
    for path in sorted(old):
        if str(path) not in mapped:
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _mapped_files(processes: Path) -> set[str] | None:
    """Files that any process of this user has mapped or open; None when one cannot be asked."""
    found: set[str] = set()
    for process in processes.glob("[0-9]*"):
        try:
            if process.stat().st_uid != os.geteuid():
                continue
            for line in (process / "maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6:
                    found.add(fields[5])
            found |= {os.readlink(link) for link in (process / "fd").iterdir()}
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError:
            return None
    return found
