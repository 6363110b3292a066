"""The stores of this server: opened, adopted and looked at again until each can be injected.

API process. A store that cannot be opened, or has no encoding that fits, takes nothing from the
others: its users are served as text or as unknown, and ``refresh`` tries again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from inferscale_runtime.config import StoreEntry
from inferscale_runtime.errors import InferScaleError, StoreError
from inferscale_runtime.retrieval.batcher import EmbeddingBatcher
from inferscale_runtime.retrieval.embedder import Embedder, load_embedder
from inferscale_runtime.server.identity import Identity
from inferscale_runtime.server.staging import Staging
from inferscale_runtime.server.users import UserCache, UserView
from inferscale_runtime.store.store import Store
from inferscale_runtime.tiers.arena import Arena

logger = logging.getLogger("vllm.inferscale.stores")

UNREADABLE = "store_unreadable"
PREAMBLE_KEY = "preamble"
AWAY_SECONDS = 10.0
"""How long a storage that failed is passed over, so that it does not slow down the users of the
other stores (arbitrary)."""

FindIdentity = Callable[[Store, str | None], Identity]
EmbedderName = Callable[[Identity], str]


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store as requests use it; replaced as a whole, so that a request sees one state.

    Attributes:
        entry: Name and URL.
        store: The store.
        users: Its users.
        staging: Its reader.
        identity: Template and fingerprint.
        questions: Embeds questions as this store's facts were, or None when that cannot be.
        embedder: Name of the embedder, ``""`` without one.
    """

    entry: StoreEntry
    store: Store
    users: UserCache
    staging: Staging
    identity: Identity
    questions: EmbeddingBatcher | None
    embedder: str

    @property
    def preamble_key(self) -> str:
        """The preamble's key in the arena."""
        return f"{self.entry.name}/{self.identity.fingerprint}/{PREAMBLE_KEY}"


class Embedders:
    """Loads each embedder once, however many stores use it.

    Args:
        api_key_file: For endpoints.
        load: Replaced in tests.
    """

    def __init__(
        self, api_key_file: str | None, load: Callable[..., Embedder] = load_embedder
    ) -> None:
        self._api_key_file = api_key_file
        self._load = load
        self._lock = threading.Lock()
        self._loaded: dict[str, EmbeddingBatcher] = {}

    def get(self, name: str) -> EmbeddingBatcher:
        """The embedder of a name, loaded and warm.

        Raises:
            InferScaleError: When it cannot be loaded or does not answer.
        """
        with self._lock:
            if name not in self._loaded:
                embedder = self._load(name, api_key_file=self._api_key_file)
                embedder.embed(["warm up"])
                self._loaded[name] = EmbeddingBatcher(embedder)
            return self._loaded[name]


class ServedStore:
    """One store and what is wrong with it, if anything.

    Args:
        entry: Name, URL and pin.
        arena: Where its segments go.
        stage_timeout_seconds: How long a request waits for its segments.
        open_store: Opens a URL; replaced in tests.
    """

    def __init__(
        self,
        entry: StoreEntry,
        arena: Arena,
        stage_timeout_seconds: float,
        open_store: Callable[[str], Store] = Store.open,
    ) -> None:
        self.entry = entry
        self.current: OpenStore | None = None
        self._away_until = 0.0
        self.embedder_problem: str | None = None
        self._arena = arena
        self._timeout = stage_timeout_seconds
        self._open_store = open_store

    @property
    def reason(self) -> str | None:
        """Why nothing of this store is injected, or None."""
        return self.current.identity.reason if self.current else UNREADABLE

    @property
    def settled(self) -> bool:
        """Nothing is left to be tried."""
        return self.reason is None and self.embedder_problem is None

    @property
    def away(self) -> bool:
        """The storage failed a moment ago: who does not name this store need not wait for it."""
        return time.monotonic() < self._away_until

    def find(self, opened: OpenStore, user: str) -> UserView | None:
        """A user's view, None for an unknown one; blocks.

        Raises:
            StoreError: When it cannot be read.
        """
        try:
            return opened.users.get(user, opened.identity.fingerprint)
        except StoreError:
            raise
        except Exception as error:
            # Each storage has errors of its own, and its timeouts may be long.
            self._away_until = time.monotonic() + AWAY_SECONDS
            logger.warning("store '%s' does not answer: %s", self.entry.name, _brief(error))
            raise StoreError(f"store '{self.entry.name}' does not answer") from error

    def sweep(self) -> None:
        """Forgets what users have no longer; blocks. A store that does not answer waits."""
        if self.current is None or self.away:
            return
        try:
            self.current.users.sweep()
        except Exception as error:
            # Each storage has errors of its own.
            logger.warning("store '%s' could not be looked through: %s", self.entry.name,
                           _brief(error))  # fmt: skip

    def refresh(
        self, find: FindIdentity, embedder_name: EmbedderName, embedders: Embedders
    ) -> None:
        """Tries what has not worked so far; blocks.

        An encoding that was adopted stays in use whatever else is encoded meanwhile.
        """
        if self.settled:
            return
        try:
            identity = self.current.identity if self.current and not self.reason else None
            if self.current is None:
                store = self._open_store(self.entry.url)
                users = UserCache(store, self.entry.name, self._arena.discard)
                staging = Staging(store, self.entry.name, self._arena, self._timeout)
            else:
                store, users, staging = (
                    self.current.store, self.current.users, self.current.staging,
                )  # fmt: skip
            identity = identity or find(store, self.entry.expected_fingerprint)
        except Exception as error:
            # Of any kind: each storage has errors of its own, and the other stores go on.
            if self.current is None:
                logger.warning("store '%s' cannot be used: %s", self.entry.name, _brief(error))
            return
        questions, name = self._embedder(embedder_name(identity), embedders)
        found = OpenStore(self.entry, store, users, staging, identity, questions, name)
        # The preamble first: a request that sees the identity finds it resident.
        if identity.preamble_kv is not None and self.reason is not None:
            key = found.preamble_key
            if not self._arena.put(key, identity.preamble_kv, pin=True):
                raise StoreError(
                    "tiers.dram_bytes: the preamble does not fit; make the arena larger"
                )
        self.current = found

    def _embedder(self, name: str, embedders: Embedders) -> tuple[EmbeddingBatcher | None, str]:
        try:
            questions = embedders.get(name)
        except InferScaleError as error:
            if self.embedder_problem is None:
                logger.warning("store '%s': %s", self.entry.name, error)
            self.embedder_problem = str(error)
            return None, ""
        self.embedder_problem = None
        return questions, name


def _brief(error: Exception) -> str:
    # Messages of storage libraries may quote signed URLs; ours do not.
    return str(error) if isinstance(error, InferScaleError) else type(error).__name__


class UnknownStoreError(Exception):
    """The request names a store that this server does not have.

    Attributes:
        known: Names of those it has.
    """

    def __init__(self, known: tuple[str, ...]) -> None:
        super().__init__()
        self.known = known


def find_user(
    stores: Mapping[str, ServedStore], name: str | None, user: str
) -> tuple[OpenStore | None, UserView | None, bool]:
    """Finds a user; blocks.

    Args:
        stores: By name, in the order in which they are asked.
        name: The store that the request names, or None for the first that has the user.
        user: User id.

    Returns:
        The store and the user's view there, both None when no store has the user, or the named
        store without a view; and whether a store could not be asked.

    Raises:
        UnknownStoreError: For a name that does not exist.
        StoreError: When the user's facts cannot be read and no other store has the user.
    """
    if name is not None and name not in stores:
        raise UnknownStoreError(tuple(stores))
    asked = [stores[name]] if name is not None else list(stores.values())
    failed: StoreError | None = None
    unasked = False
    for served in asked:
        current = served.current
        if current is None or (name is None and served.away):
            unasked = True
            continue
        try:
            view = served.find(current, user)
        except StoreError as error:
            failed = failed or error
            continue
        if view is not None:
            return current, view, False
    if failed is not None:
        raise failed
    return (asked[0].current if name is not None else None), None, unasked
