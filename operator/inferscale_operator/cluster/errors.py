"""Errors of the Kubernetes API, by what can be done about them.

ClusterError
├── AlreadyExistsError   someone made it first
├── ConflictError        another version (409, 422 of a JSON-patch test), or it is gone: look again
├── InvalidError         the object is refused (400, 403, 422): a person has to act
├── OwnedByOtherError    an object of this name belongs to someone else: a person has to act
└── UnavailableError     try later (401, 429, 5xx, no connection, timeout)
"""

from __future__ import annotations


class ClusterError(Exception):
    """Any failed call to the API."""

    reason = "ClusterError"


class AlreadyExistsError(ClusterError):
    """The object to be made exists."""

    reason = "AlreadyExists"


class ConflictError(ClusterError):
    """The object changed, or went away, in between."""

    reason = "Conflict"


class InvalidError(ClusterError):
    """The API server refuses the object or the call."""

    reason = "Invalid"


class OwnedByOtherError(ClusterError):
    """An object with the name of a child is not the operator's; it is left as it is."""

    reason = "OwnedByOther"


class UnavailableError(ClusterError):
    """The API server cannot answer now.

    Attributes:
        retry_after: Seconds that the server asked to wait, or None.
    """

    reason = "Unavailable"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
