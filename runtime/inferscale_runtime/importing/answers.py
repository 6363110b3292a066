"""What every reader does with a tool's answers: check their form, and go through their pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from inferscale_runtime.errors import ConfigError, SourceError
from inferscale_runtime.importing.records import ToolMemory, ToolUser

_T = TypeVar("_T")


class Answer(BaseModel):
    """A part of an answer; fields that are not needed are passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Reader(Protocol):
    """One tool."""

    origin: str
    """The tool's name, as facts in the store carry it."""
    source: str
    """Where it is, without credentials; a folder belongs to one source."""

    def users(self) -> list[ToolUser]:
        """Lists all users, each once, whole."""

    def read(self, user: ToolUser, known: ToolMemory) -> ToolMemory:
        """Reads all that the tool holds about a user now.

        Args:
            user: As `users` gave it.
            known: What was read of this user before; saves asking again for what cannot change.
        """

    def skipped(self) -> dict[str, int]:
        """What was left out, by reason; known after `users`."""

    def close(self) -> None:
        """Lets everything go."""


def checked(adapter: TypeAdapter[_T], value: object, where: str) -> _T:
    """Checks the form of an answer.

    Args:
        adapter: The form.
        value: The answer.
        where: What was asked, for the message.

    Raises:
        ConfigError: Naming the field; never a value.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
        raise ConfigError(
            f"{where}: field '{field or 'answer'}' is not as documented ({first['type']}); "
            "docs/sources.md names the version of the API that is spoken"
        ) from None


def refuse_later_page(cursor: str | None, where: str) -> None:
    """A first page that is not there means that there is nothing; a later one, that it is cut.

    Raises:
        SourceError: For a later page.
    """
    if cursor is not None:
        raise SourceError(f"{where}: it was deleted while it was read; run the same command again")


def by_cursor(ask: Callable[[str | None], tuple[list[_T], str | None]], where: str) -> Iterator[_T]:
    """Goes through pages that each name the next one.

    Args:
        ask: Gives the items and the next cursor of the page at a cursor; None is the first page.
        where: What is asked, for the message.

    Raises:
        SourceError: When the pages go round in a circle.
    """
    cursor: str | None = None
    seen: set[str] = set()
    while True:
        items, cursor = ask(cursor)
        yield from items
        if not cursor:
            return
        if cursor in seen:
            raise SourceError(f"{where}: the pages repeat; run the same command again")
        seen.add(cursor)


def after_last(ask: Callable[[str | None], list[_T]], name: Callable[[_T], str]) -> Iterator[_T]:
    """Goes through pages that start after an item; ends with a page that has nothing new.

    Args:
        ask: Gives the page after an item's id; None is the first page.
        name: Id of an item.
    """
    last: str | None = None
    seen: set[str] = set()
    while True:
        fresh = [item for item in ask(last) if name(item) not in seen]
        if not fresh:
            return
        seen.update(name(item) for item in fresh)
        yield from fresh
        last = name(fresh[-1])
