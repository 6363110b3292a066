"""Users' facts in memory, kept equal to their manifests.

API process; the calls block and run in threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
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
    """

    memory: UserMemory
    mark: str
    segments: dict[str, Segment]
    damaged: set[str] = field(default_factory=set)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def token_ids(self, index: int, template: Template) -> tuple[int, ...]:
        """Prompt tokens of one fact; those of its segment when it has one."""
        fact = self.memory.facts[index]
        if fact.id in self.segments:
            return self.segments[fact.id].token_ids
        if index not in self.tokens:
            self.tokens[index] = tuple(template.fact_token_ids(fact.text))
        return self.tokens[index]


class UserCache:
    """Loads users and reloads them when their manifest moves."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._lock = threading.Lock()
        self._views: OrderedDict[tuple[str, str], UserView] = OrderedDict()

    def get(self, user: str, fingerprint: str) -> UserView | None:
        """The current view of a user, or None for an unknown one.

        Raises:
            StoreError: When the user's facts cannot be read.
        """
        mark = self._store.manifest_mark(user)
        if mark is None:
            return None
        name = (user, fingerprint)
        with self._lock:
            view = self._views.get(name)
            if view is not None and view.mark == mark:
                self._views.move_to_end(name)
                return view
        memory = self._store.read_user(user)
        if memory is None:
            return None
        segments = {
            identity: replace(segment, key=f"{self._name}/{segment.key}")
            for identity, segment in memory.encodings.get(fingerprint, {}).items()
        }
        view = UserView(memory, mark, segments)
        with self._lock:
            self._views[name] = view
            while len(self._views) > MAX_CACHED_USERS:
                self._views.popitem(last=False)
        return view
