"""Facts themselves into the store, before their KV is made; others may write at the same time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from inferscale_runtime.encode.changes import merge_memory
from inferscale_runtime.encode.input import UserInput
from inferscale_runtime.encode.limits import StoreBudget, expired_facts
from inferscale_runtime.errors import StoreConflictError
from inferscale_runtime.retrieval.embedder import Embedder, load_embedder
from inferscale_runtime.store.living import delete_facts
from inferscale_runtime.store.records import UserMemory
from inferscale_runtime.store.store import Store

_TRIES = 20
"""Repetitions of a commit that another writer came before (arbitrary)."""

Rows = npt.NDArray[np.float32]


class FactsCommitter:
    """Writes users' facts, turns and embeddings.

    Args:
        store: The store.
        budget: Keeps it below its byte limit.
        embedder_name: Of the embedder that all facts have.
        api_key_file: Of an ``openai:`` embedder, or None.
    """

    def __init__(
        self, store: Store, budget: StoreBudget, embedder_name: str, api_key_file: str | None
    ) -> None:
        self._store = store
        self._budget = budget
        self._embedder_name = embedder_name
        self._api_key_file = api_key_file
        self._embedder: Embedder | None = None
        self.removed = 0

    def commit(self, given: UserInput) -> UserMemory:
        """Merges a user's input with what is stored, and writes it if it is news.

        Raises:
            ConfigError: When the store's quota would be passed.
        """
        name = self._embedder_name
        rows: dict[str, Rows] = {}
        for left in reversed(range(_TRIES)):
            old = self._store.read_user(given.user)
            memory, todo = merge_memory(
                given.user, old, given.facts, given.turns, name, given.origins
            )
            if old is None and not given.facts and not given.turns:
                return memory  # a user without memory is no user of the store
            memory = self._embedded(memory, todo, rows)
            same = old is not None and (old.facts, old.turns, old.encodings, old.tombstones) == (
                memory.facts, memory.turns, memory.encodings, memory.tombstones
            )  # fmt: skip
            if same and not todo:
                return memory
            texts = (*(f.text for f in given.facts), *(t.text for t in given.turns)) if todo else ()
            self._budget.spend(given.user, sum(len(text.encode()) for text in texts))
            try:
                committed = self._store.commit_user(memory, {})
            except StoreConflictError:
                if not left:
                    raise
                continue  # The memory API wrote meanwhile.
            if old is not None:
                kept = {fact.id for fact in memory.facts}
                self.removed += sum(fact.id not in kept for fact in old.facts)
            return committed
        raise AssertionError("unreachable")

    def with_embeddings(self, user: str) -> UserMemory | None:
        """A user as stored, with embeddings of this job's embedder; None when it is gone."""
        rows: dict[str, Rows] = {}
        for left in reversed(range(_TRIES)):
            old = self._store.read_user(user)
            name = self._embedder_name
            if old is None or (old.embedder == name and old.embeddings.shape[1]):
                return old
            todo = list(range(len(old.facts)))
            memory = self._embedded(replace(old, embedder=name), todo, rows)
            try:
                return self._store.commit_user(memory, {})
            except StoreConflictError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    def forget_expired(self, user: str, max_age_days: int) -> int:
        """Deletes a user's facts of the memory API that are too old, and returns how many."""
        memory = self._store.read_user(user)
        ids = expired_facts(memory, max_age_days, datetime.now(UTC)) if memory else []
        return len(delete_facts(self._store, user, ids).deleted) if ids else 0

    def _embedded(self, memory: UserMemory, todo: list[int], rows: dict[str, Rows]) -> UserMemory:
        """Fills the embeddings of ``todo`` in; ``rows`` keeps them by text for another try."""
        if not todo:
            return memory
        texts = [memory.facts[n].text for n in todo]
        if missing := sorted({*texts} - rows.keys()):
            rows.update(zip(missing, self._embed(missing), strict=True))
        width = len(rows[texts[0]])
        embeddings = memory.embeddings
        if embeddings.shape[1] != width:
            embeddings = np.zeros((len(memory.facts), width), np.float32)
        embeddings[todo] = np.stack([rows[text] for text in texts])
        return replace(memory, embeddings=embeddings)

    def _embed(self, texts: list[str]) -> Rows:
        """Loads the embedder with the first fact that needs it: a run without news needs none."""
        if self._embedder is None:
            self._embedder = load_embedder(
                self._embedder_name,
                api_key_file=self._api_key_file,
            )
        return self._embedder.embed(texts)
