"""Makes a folder follow a tool, and tells what changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from inferscale_runtime.errors import SourceError
from inferscale_runtime.importing.answers import Reader
from inferscale_runtime.importing.folder import ImportFolder, State, UserState
from inferscale_runtime.importing.records import (
    Difference,
    ToolMemory,
    ToolUser,
    clean,
    difference,
)

SAVE_SECONDS = 5.0
"""Least time between two writes of the state; a killed import reads so much again (arbitrary)."""
RESUME_SECONDS = 3600.0
"""An unfinished reading that began longer ago starts again, or its first users would be stale."""


@dataclass(slots=True)
class SyncReport:
    """What an import did.

    Attributes:
        users: Users that the tool lists.
        read: Users that were read.
        unchanged: Users that were not read, because the tool's marker is the same.
        resumed: Users that the interrupted run before had read.
        gone: Users that are listed no more; their facts are deleted.
        facts: Created, updated, deleted and unchanged facts of the users that were read or are
            gone.
        by_user: The same by user, without those who have not changed.
        skipped: What was left out, by reason.
    """

    users: int = 0
    read: int = 0
    unchanged: int = 0
    resumed: int = 0
    gone: int = 0
    facts: Difference = field(default_factory=Difference)
    by_user: dict[str, Difference] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)


def nobody_left(origin: str, source: str, before: int, flag: str) -> SourceError:
    """The error of a tool that lists nobody, where it listed somebody before.

    An API key of another project looks just so, and would delete everything.
    """
    return SourceError(
        f"{origin}: {source} lists no user, and {before} are known from before. Nothing was "
        f"changed; if all of them are to be deleted, say so with {flag}"
    )


class Sync:
    """One import into a folder.

    Args:
        reader: The tool.
        folder: The files; locked by the caller unless it is a dry run.
        source: Where the tool is, with the options that change what is read.
        dry_run: Read and count, and write nothing.
        allow_empty: Take an empty list of users for true.
        progress: Told how far it is.
        clock: Seconds since 1970; tests replace it.
    """

    def __init__(
        self,
        reader: Reader,
        folder: ImportFolder,
        source: str,
        *,
        dry_run: bool = False,
        allow_empty: bool = False,
        progress: Callable[[SyncReport], None] = lambda report: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reader, self._folder, self._source = reader, folder, source
        self._dry_run, self._allow_empty = dry_run, allow_empty
        self._progress, self._clock = progress, clock
        self._saved = 0.0

    def run(self) -> SyncReport:
        """Reads what changed and replaces its files.

        Raises:
            InferScaleError: Something failed; what was read until then is kept, and the next run
                goes on there.
        """
        report = SyncReport()
        state = self._folder.read_state(self._reader.origin, self._source)
        listed = self._reader.users()
        report.users, report.skipped = len(listed), self._reader.skipped()
        known = [user for user, entry in state.users.items() if not entry.gone]
        if not listed and known and not self._allow_empty:
            raise nobody_left(self._reader.origin, self._source, len(known), "--allow-empty")
        self._save(state, at_once=True)  # before any file, so that no folder is without a state
        try:
            self._read_all(listed, state, report)
            self._remove_gone({user.id for user in listed}, state, report)
            state.reading, state.reading_since = [], 0.0
        finally:
            self._save(state, at_once=True)
        return report

    def _read_all(self, listed: list[ToolUser], state: State, report: SyncReport) -> None:
        now = self._clock()
        if not 0 <= now - state.reading_since < RESUME_SECONDS:
            state.reading, state.reading_since = [], now
        done = set(state.reading)
        for user in listed:
            if user.id in done and user.id in state.users:
                report.resumed += 1
                continue
            old = self._folder.read(user.id)
            entry = state.users.get(user.id)
            same = entry is not None and not entry.gone and entry.marker is not None
            if old is not None and same and entry is not None and entry.marker == user.marker:
                report.unchanged += 1
            else:
                self._read_one(user, old, report)
                state.users[user.id] = UserState(marker=user.marker)
            state.reading.append(user.id)
            self._save(state)
            self._progress(report)

    def _read_one(self, user: ToolUser, old: ToolMemory | None, report: SyncReport) -> None:
        new = clean(self._reader.read(user, old or ToolMemory()))
        report.read += 1
        self._count(user.id, difference(old or ToolMemory(), new), report)
        if new != old and not self._dry_run:
            self._folder.write(user.id, self._reader.origin, new)

    def _remove_gone(self, listed: set[str], state: State, report: SyncReport) -> None:
        for user, entry in state.users.items():
            if user in listed or entry.gone:
                continue
            old = self._folder.read(user) or ToolMemory()
            report.gone += 1
            self._count(user, difference(old, ToolMemory()), report)
            if not self._dry_run:
                self._folder.write(user, self._reader.origin, ToolMemory())
                entry.gone, entry.marker = True, None

    def _count(self, user: str, change: Difference, report: SyncReport) -> None:
        report.facts += change
        if change.created or change.updated or change.deleted:
            report.by_user[user] = change

    def _save(self, state: State, *, at_once: bool = False) -> None:
        if self._dry_run or (not at_once and self._clock() - self._saved < SAVE_SECONDS):
            return
        self._folder.write_state(state)
        self._saved = self._clock()
