"""What Mem0's library, its own server and its platform have in common: the form of a memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime

from pydantic import Field

from inferscale_runtime.importing.answers import Answer
from inferscale_runtime.importing.records import ToolFact, in_order

ORIGIN = "mem0"


class Row(Answer):
    """One memory."""

    id: str = Field(min_length=1)
    memory: str | None = None
    created_at: str | None = None
    updated_at: str | None = None
    expiration_date: str | None = None
    replaced_by: str | None = None


def today() -> date:
    """The day that expiry counts from, in UTC as in Mem0."""
    return datetime.now(UTC).date()


def valid(rows: Iterable[Row], day: date) -> list[Row]:
    """Leaves out what has expired or was replaced by a newer memory."""
    return [row for row in rows if not row.replaced_by and not _expired(row, day)]


def _expired(row: Row, day: date) -> bool:
    try:
        return date.fromisoformat((row.expiration_date or "")[:10]) < day
    except ValueError:
        return False


def facts(rows: Sequence[Row]) -> tuple[ToolFact, ...]:
    """The memories as facts, in the order in which they were made."""
    found = (ToolFact(row.id, row.memory or "", row.updated_at or row.created_at) for row in rows)
    return in_order(zip((row.created_at for row in rows), found, strict=True))
