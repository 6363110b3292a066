"""Errors of the runtime.

::

    InferScaleError
    ├── ConfigError            a setting or argument is wrong; the user must edit it
    │   ├── BudgetError            the memory asked for cannot fit
    │   └── QuotaError             a limit on facts or bytes would be passed
    ├── InputError             a line of an input file is wrong (file, line, field)
    ├── SourceError            an input cannot be fetched or was cut short; another try may do
    ├── UnsupportedModelError  the model cannot be injected (architecture, rope, attention)
    └── StoreError             the store cannot be used
        ├── StoreFormatError       not a store, or a version this release cannot read
        ├── DamagedStoreError      a checksum or length does not match; names the file
        ├── StoreConflictError     another writer changed the user first; retry from a fresh read
        │   └── PreconditionFailed     the user is not at the version that the caller asked for
        └── StoreUnwritableError   the store cannot be written (permissions, disk full)

Messages name the object, the field, the value and the mend. None carries fact text.
"""

from __future__ import annotations

from collections.abc import Sequence


class InferScaleError(Exception):
    """Base of all errors that a user may see.

    The CLI prints the message and exits with 2 for ``USER_ERRORS``, with 1 for the others.
    """


class ConfigError(InferScaleError):
    """A setting or an argument is wrong."""


class BudgetError(ConfigError):
    """The memory asked for cannot fit; the message names the terms and what to change.

    Args:
        message: One line.
        rows: The terms as far as they were computed.
    """

    def __init__(self, message: str, rows: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class QuotaError(ConfigError):
    """A limit on facts or bytes would be passed."""


class InputError(InferScaleError):
    """A line of an input file is wrong.

    Args:
        source: File name.
        line: 1-based line number, 0 when the whole file is meant.
        field: Name of the field, or ``""``.
        problem: What is wrong, without any fact text.
        fix: What to do.
    """

    def __init__(self, source: str, line: int, field: str, problem: str, fix: str) -> None:
        where = f"{source}:{line}" if line else source
        what = f" field '{field}'" if field else ""
        super().__init__(f"{where}:{what} {problem}. {fix}")
        self.source, self.line, self.field = source, line, field


class SourceError(InferScaleError):
    """An input cannot be fetched, or less of it came than there is."""


class UnsupportedModelError(InferScaleError):
    """The model cannot be encoded or injected; the message names the property."""


class StoreError(InferScaleError):
    """The store cannot be used."""


class StoreFormatError(StoreError):
    """The path is no store, or of a version that this release cannot read."""


class DamagedStoreError(StoreError):
    """A file is missing, truncated or fails its checksum.

    Args:
        path: The file, relative to the store's root.
        problem: What does not match.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(
            f"store file '{path}' is damaged: {problem}. Its facts are served as text; "
            "run 'inferscale encode' again to rebuild it"
        )
        self.path = path


class StoreConflictError(StoreError):
    """Another writer committed this user first."""


class PreconditionFailed(StoreConflictError):
    """The user is not at the version that the caller asked for; only the caller can go on.

    Args:
        user: User id.
        wanted: The version asked for.
        version: The version that the user has, 0 for an unknown one.
    """

    def __init__(self, user: str, wanted: int, version: int) -> None:
        super().__init__(
            f"user '{user}' is at version {version}, the write asks for {wanted}. Read the user "
            "again and repeat the write"
        )
        self.version = version


class StoreUnwritableError(StoreError):
    """The store's folder or bucket cannot be written."""


USER_ERRORS = (ConfigError, InputError, UnsupportedModelError, StoreFormatError)
"""Errors that come again until somebody edits something."""
