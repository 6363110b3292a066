"""Refresh schedules in cron syntax, in UTC."""

from __future__ import annotations

from datetime import datetime, timedelta

from cronsim import CronSim, CronSimError


def check_schedule(expression: str) -> str | None:
    """Why an expression is no schedule, or None."""
    try:
        next(CronSim(expression, datetime(2026, 1, 1)))
    except (CronSimError, StopIteration) as error:
        return str(error) or "it never comes due"
    return None


def last_due(expression: str, now: datetime) -> datetime:
    """The latest due time at or before ``now``; the start of ``now``'s minute counts.

    Raises:
        StopIteration: When it was never due in the last years (February 30).
    """
    return next(CronSim(expression, now + timedelta(seconds=1), reverse=True))


def next_due(expression: str, now: datetime) -> datetime:
    """The first due time after ``now``."""
    return next(CronSim(expression, now))
