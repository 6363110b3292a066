"""Chats that keep their facts in place from turn to turn (API process, event loop only).

What is remembered is which facts stand where, never a text. It is lost with the process: then the
next turn retrieves anew, which is right and only slower. A session whose facts are not all there
any more, or were corrected, is never continued.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from inferscale_runtime.config import SessionConfig
from inferscale_runtime.prompt.plan import Order, order_facts
from inferscale_runtime.store.records import Fact

Owner = tuple[str, str]
"""Store name and user id."""


@dataclass(frozen=True, slots=True)
class KeptFact:
    """One fact of a session.

    Attributes:
        id: Its id.
        digest: Of its text, which another fact of that id may not have.
    """

    id: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Session:
    """Which facts stand where in one chat.

    Attributes:
        epoch: Of the user's memory; another one means that something was deleted or changed.
        base: The facts before the conversation, in prompt order.
        claimable: How many of them, from the first, are injected.
        notes: Digest of a place in the conversation -> the facts that stand there.
    """

    epoch: int
    base: tuple[KeptFact, ...]
    claimable: int
    notes: Mapping[str, tuple[KeptFact, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """A session's facts in this request's prompt, as indexes into the user's facts.

    Attributes:
        base: Before the conversation.
        claimable: How many of these may be injected.
        notes: Message index -> facts in front of that message.
        new_facts: How many of them this turn added.
        session: What to remember.
    """

    base: tuple[int, ...]
    claimable: int
    notes: Mapping[int, tuple[int, ...]]
    new_facts: int
    session: Session


def keep(fact: Fact) -> KeptFact:
    """What a session remembers of a fact."""
    return KeptFact(fact.id, hashlib.sha256(fact.text.encode()).digest())


def start_session(
    epoch: int, facts: Sequence[Fact], order: Sequence[int], claimable: int
) -> Session:
    """Begins a session with the facts of its first prompt.

    Args:
        epoch: Of the user's memory.
        facts: All facts of the user.
        order: Indexes of those in the prompt, in prompt order.
        claimable: How many of them, from the first, have KV.
    """
    return Session(epoch, tuple(keep(facts[n]) for n in order), claimable)


def continue_session(
    session: Session,
    epoch: int,
    facts: Sequence[Fact],
    turns: Sequence[tuple[int, str]],
    best: Sequence[int],
    order: Order,
    config: SessionConfig,
) -> Layout | None:
    """Lays out the next turn of a session.

    Args:
        session: What is remembered.
        epoch: Of the user's memory now.
        facts: All facts of the user now.
        turns: Index and digest of the user messages of the conversation.
        best: Indexes of the facts retrieved for the newest question, best first.
        order: Order of the facts that this turn adds.
        config: Limits.

    Returns:
        The layout, or None when the session must begin anew: something was deleted or changed, or
        it would have too many facts.
    """
    if epoch != session.epoch:
        # The salt has changed too, so there is nothing in the prefix cache to hold on to.
        return None
    positions = {fact.id: n for n, fact in enumerate(facts)}

    def locate(kept: Sequence[KeptFact]) -> tuple[int, ...]:
        found = tuple(positions.get(fact.id, -1) for fact in kept)
        valid = all(n >= 0 and keep(facts[n]) == fact for n, fact in zip(found, kept, strict=True))
        return found if valid else (-1,)

    base = locate(session.base)
    places = {key: locate(kept) for key, kept in session.notes.items()}
    if any(-1 in found for found in (base, *places.values())):
        return None
    notes = {index: places[key] for index, key in turns if key in places}
    if not turns:
        return Layout(base, session.claimable, notes, 0, session)
    newest, key = turns[-1]
    noted = notes.pop(newest, ())
    known = {*base, *(n for found in notes.values() for n in found)}
    # Counted with what this turn has already: a question sent again adds nothing.
    wanted = [n for n in best if n not in known][: config.new_facts]
    added = order_facts([n for n in wanted if n not in noted], order)
    if sum(len(found) for found in (base, *places.values())) + len(added) > config.max_facts:
        return None
    note = (*noted, *added)
    if note:
        notes[newest] = note
        kept = {**session.notes, key: tuple(keep(facts[n]) for n in note)}
        session = replace(session, notes=kept)
    return Layout(base, session.claimable, notes, len(added), session)


class Sessions:
    """The sessions of this server, bounded in number and time.

    Args:
        config: Limits.
        clock: Seconds, monotonic.
    """

    def __init__(self, config: SessionConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        # Least recently used first, which is also the order in which they end.
        self._held: OrderedDict[tuple[Owner, str], tuple[float, Session]] = OrderedDict()
        self._names: dict[Owner, OrderedDict[str, None]] = {}

    def __len__(self) -> int:
        """Sessions that are remembered."""
        return len(self._held)

    def get(self, owner: Owner, name: str) -> Session | None:
        """A session, or None when there is none (any more)."""
        self._expire()
        held = self._held.get((owner, name))
        return held[1] if held else None

    def put(self, owner: Owner, name: str, session: Session) -> None:
        """Remembers a session; others are forgotten where there is no room."""
        self._expire()
        self._drop(owner, name)
        self._held[(owner, name)] = (self._clock() + self.config.ttl_seconds, session)
        names = self._names.setdefault(owner, OrderedDict())
        names[name] = None
        if len(names) > self.config.max_sessions_per_user:
            self._drop(owner, next(iter(names)))
        if len(self._held) > self.config.max_sessions:
            self._drop(*next(iter(self._held)))

    def forget(self, owner: Owner) -> None:
        """Forgets all sessions of a user."""
        for name in list(self._names.get(owner, ())):
            self._drop(owner, name)

    def _expire(self) -> None:
        now = self._clock()
        while self._held and next(iter(self._held.values()))[0] <= now:
            self._drop(*next(iter(self._held)))

    def _drop(self, owner: Owner, name: str) -> None:
        if self._held.pop((owner, name), None) is not None:
            names = self._names[owner]
            del names[name]
            if not names:
                del self._names[owner]
