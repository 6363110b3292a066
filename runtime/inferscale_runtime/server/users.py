"""Users' facts in memory, kept equal to their manifests.

When a user's manifest moves, the arena forgets the segments that the user has no longer. That is
noticed by the next request of the user, and for users whom nobody asks for by ``sweep``.

API process; the calls block and run in threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from inferscale_runtime.prompt.template import Template
from inferscale_runtime.store.records import Segment, UserMemory
from inferscale_runtime.store.store import Store

MAX_CACHED_USERS = 4096
"""Users whose facts and embeddings stay in memory (arbitrary: about 2 GB at 300 facts each)."""


@dataclass(slots=True)
class UserView:
    """One version of a user's memory.

    Attributes:
        memory: Facts, embeddings, segment index.
        mark: Of the manifest that it was read from.
        segments: Segments of the server's fingerprint by fact id; their keys begin with the
            store's name, because two stores may hold the same fact of the same user.
        damaged: Keys whose bytes failed their checksum in this version.
        tokens: Fact index -> prompt tokens, for facts without a segment.
        retired: Keys that a newer version has no longer; who has put one of them into the arena
            since takes it out again.
    """

    memory: UserMemory
    mark: str
    segments: dict[str, Segment]
    damaged: set[str] = field(default_factory=set)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    retired: frozenset[str] = frozenset()

    def token_ids(self, index: int, template: Template) -> tuple[int, ...]:
        """Prompt tokens of one fact; those of its segment when it has one."""
        fact = self.memory.facts[index]
        if fact.id in self.segments:
            return self.segments[fact.id].token_ids
        if index not in self.tokens:
            self.tokens[index] = tuple(template.fact_token_ids(fact.text))
        return self.tokens[index]


class UserCache:
    """Loads users, reloads them when their manifest moves and forgets what is gone.

    Args:
        store: Where they are.
        name: The store's name.
        discard: Takes keys of the arena that no request may use any more.
    """

    def __init__(self, store: Store, name: str, discard: Callable[[Sequence[str]], object]) -> None:
        self._store = store
        self._name = name
        self._discard = discard
        self._lock = threading.Lock()
        self._views: OrderedDict[tuple[str, str], UserView] = OrderedDict()

    def get(self, user: str, fingerprint: str) -> UserView | None:
        """The current view of a user, or None for an unknown one.

        Raises:
            StoreError: When the user's facts cannot be read.
        """
        mark = self._store.manifest_mark(user)
        name = (user, fingerprint)
        if mark is not None:
            with self._lock:
                view = self._views.get(name)
                if view is not None and view.mark == mark:
                    self._views.move_to_end(name)
                    return view
        memory = self._store.read_user(user) if mark is not None else None
        if mark is None or memory is None:
            self._replace(name, None)
            return None
        segments = {
            identity: replace(segment, key=f"{self._name}/{segment.key}")
            for identity, segment in memory.encodings.get(fingerprint, {}).items()
        }
        view = UserView(memory, mark, segments)
        self._replace(name, view)
        return view

    def sweep(self) -> None:
        """Looks at every user of whom something is kept, whether anybody asks for it or not.

        Raises:
            StoreError: When a manifest cannot be read; the users before it are done.
        """
        with self._lock:
            names = list(self._views.items())
        for name, view in names:
            if self._store.manifest_mark(name[0]) != view.mark:
                # Not loaded anew: nobody asked for it.
                self._replace(name, None)

    def _replace(self, name: tuple[str, str], view: UserView | None) -> None:
        gone: list[str] = []
        with self._lock:
            old = self._views.pop(name, None)
            if old is not None:
                gone += _retire(old, view)
            if view is not None:
                self._views[name] = view
            while len(self._views) > MAX_CACHED_USERS:
                # Nobody would notice any more that one of its segments has gone.
                gone += _retire(self._views.popitem(last=False)[1], None)
        if gone:
            self._discard(gone)


def _retire(old: UserView, new: UserView | None) -> list[str]:
    left = {segment.key for segment in new.segments.values()} if new else set[str]()
    gone = [segment.key for segment in old.segments.values() if segment.key not in left]
    # First the mark, then the arena: a reader that puts a segment between the two sees the mark.
    old.retired = frozenset(gone)
    return gone
