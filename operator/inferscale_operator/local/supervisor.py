"""The process between ``up`` and one container's command; run as a script, standard library only.

It stands for the container's PID namespace: whatever the command starts, also in sessions of its
own, ends with it. It lives as long as the pipe on its standard input is open, so that nothing is
left when ``up`` dies in any way, SIGKILL included. Only when this process itself is killed, its
child is killed by the kernel (parent-death signal) and deeper processes may stay.

Usage: ``python -I -S supervisor.py COMMAND...``. SIGTERM is passed on to the command alone, as a
container runtime does it. A byte on standard input, or its end, kills all. The exit status is the
command's; 128 + n when signal n ended it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_RESET = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


def _prctl(option: int, value: int) -> None:
    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except AttributeError:
        return  # not Linux: the process group is all that can be ended


def _parents() -> dict[int, int]:
    """Parent of each process of this machine; empty without /proc."""
    result = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name stands in parentheses and may hold anything, so count from its end.
            fields = path.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        result[int(path.parent.name)] = int(fields[1])
    return result


def _descendants() -> list[int]:
    parents = _parents()
    found: list[int] = []
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found.extend(level)
    return found


def _kill_all(child: int) -> None:
    """Kills until nothing is left; a process may start another one meanwhile."""
    try:
        os.killpg(child, signal.SIGKILL)
    except OSError:
        pass
    while True:
        for pid in _descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _start(command: list[str]) -> int:
    parent = os.getpid()
    # A signal that is passed on at once must not meet Python's handlers in the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, _RESET)
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _RESET)
        return child
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(137)
    # Python's own dispositions would be inherited where they say "ignore".
    for number in _RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RESET)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def main(command: list[str]) -> int:
    """Runs the command to its end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    terminated = False
    child = 0

    def pass_on(number: int, _frame: object) -> None:
        nonlocal terminated
        terminated = True
        if child:
            _signal(child, number)

    signal.signal(signal.SIGTERM, pass_on)
    child = _start(command)
    if terminated:  # it came before there was a child
        _signal(child, signal.SIGTERM)
    status = None
    while status is None:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
        if 0 in ready:
            _kill_all(child)
            return 128 + signal.SIGKILL
        status = _reap(child)
    _kill_all(child)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _signal(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        return


def _reap(child: int) -> int | None:
    """The child's status once it has ended; adopted processes are reaped in passing."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
