"""Reading and writing users' memories for the routes (API process).

Writes run in threads of their own: they wait for the store and for embeddings, and chat requests
must find free threads meanwhile. Writes of one user go one after the other in this process; against
other processes the store repeats what was overtaken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from http import HTTPStatus
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from inferscale_runtime.config import QuotaConfig
from inferscale_runtime.errors import PreconditionFailed, QuotaError, StoreError
from inferscale_runtime.retrieval.batcher import MAX_BATCH, EmbeddingBatcher
from inferscale_runtime.server.refusal import Refusal, unknown_store, unknown_user
from inferscale_runtime.server.service import MemoryService
from inferscale_runtime.server.stores import OpenStore, ServedStore
from inferscale_runtime.server.users import UserView
from inferscale_runtime.store import living
from inferscale_runtime.store.living import FactWrite
from inferscale_runtime.store.store import UserReceipt

LOOK_SECONDS = 5.0
"""How often a writing thread looks whether the server is still there (arbitrary)."""
WRITERS = 8
"""Threads for writing (arbitrary: they mostly wait)."""
ORIGIN = "api"


class _Change(Protocol):
    @property
    def keys(self) -> tuple[str, ...]: ...


_T = TypeVar("_T")
_R = TypeVar("_R")
_C = TypeVar("_C", bound=_Change)


class MemoryOperations:
    """What the routes do.

    Args:
        service: Has the stores, their embedders and the arena.
        quota: Limits of one user.
    """

    def __init__(self, service: MemoryService, quota: QuotaConfig) -> None:
        self._service = service
        self._quota = quota
        self._threads = ThreadPoolExecutor(WRITERS, "memory-writer")
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def open_store(self, name: str | None) -> OpenStore:
        """The store that a request means: the one it names, else the first writable one.

        Raises:
            Refusal: 404 for an unknown name, 503 for a store that cannot be opened now.
        """
        stores = self._service.stores
        if name is not None and name not in stores:
            raise unknown_store("store", tuple(stores))
        served = stores[name] if name is not None else self._default()
        if served.current is None:
            raise unavailable("the store cannot be opened now")
        return served.current

    def writable_stores(self) -> list[OpenStore]:
        """All stores that may be written."""
        stores = self._service.stores.values()
        return [s.current for s in stores if s.entry.writable and s.current is not None]

    async def view(self, opened: OpenStore, user: str) -> UserView:
        """A user's memory as it is now.

        Raises:
            Refusal: 404 for a user without memory, 503 when the store does not answer.
        """
        view = await self.find(opened, user)
        if view is None:
            raise unknown_user("user")
        return view

    async def find(self, opened: OpenStore, user: str) -> UserView | None:
        """As :meth:`view`, but None for a user without memory."""
        served = self._service.stores[opened.entry.name]
        return await asyncio.to_thread(served.find, opened, user)

    async def put(
        self, opened: OpenStore, user: str, writes: Sequence[FactWrite], if_version: int | None
    ) -> living.Written:
        """Writes facts; they are in the next answer when this returns."""
        questions = self._writing(opened)
        loop = asyncio.get_running_loop()
        write = partial(
            living.put_facts,
            opened.store,
            user,
            writes,
            origin=ORIGIN,
            embedder=opened.embedder,
            embed=partial(_embed, loop, questions),
            limits=self._quota,
            if_version=if_version,
        )
        return await self._change(opened, user, write)

    async def delete(
        self, opened: OpenStore, user: str, ids: Sequence[str], if_version: int | None
    ) -> living.Deleted:
        """Deletes facts; no request that comes after this returns uses them."""
        self._writing(opened)
        remove = partial(
            living.delete_facts, opened.store, user, ids, origin=ORIGIN, if_version=if_version
        )
        return await self._change(opened, user, remove)

    async def erase(self, opened: OpenStore, user: str) -> tuple[UserReceipt, int]:
        """Deletes a user.

        Returns:
            The store's receipt, and how many bytes this server held in memory.
        """
        self._writing(opened)
        async with self._lock(opened, user):
            view = await self.find(opened, user)
            receipt = await self._in_thread(partial(living.erase_user, opened.store, user))
            keys = _keys(opened, view)
            held = self._service.arena.size_of(keys)
            self._service.arena.discard(keys)
            self._service.forget_sessions(opened.entry.name, user)
        return receipt, held

    async def embed(self, opened: OpenStore, view: UserView, text: str) -> npt.NDArray[np.float32]:
        """Embeds a query as the user's facts were.

        Raises:
            Refusal: 503 when that cannot be.
        """
        if opened.questions is None or view.memory.embedder != opened.embedder:
            raise unavailable("its facts were embedded with another embedder than the server has")
        return await opened.questions.embed(text)

    def _default(self) -> ServedStore:
        stores = list(self._service.stores.values())
        return next((served for served in stores if served.entry.writable), stores[0])

    async def _change(self, opened: OpenStore, user: str, change: Callable[[], _C]) -> _C:
        async with self._lock(opened, user):
            try:
                changed = await self._in_thread(change)
            except PreconditionFailed:
                raise precondition_failed() from None
            except QuotaError:
                raise quota_exceeded() from None
        # What is read by requests of before is freed with their leases.
        self._service.arena.discard([f"{opened.entry.name}/{key}" for key in changed.keys])
        return changed

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _lock(self, opened: OpenStore, user: str) -> asyncio.Lock:
        name = (opened.entry.name, user)
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    @staticmethod
    def _writing(opened: OpenStore) -> EmbeddingBatcher:
        if not opened.entry.writable:
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                f"field 'store': store '{opened.entry.name}' is read-only here; name another one",
                "store",
            )
        if opened.questions is None:
            raise unavailable("its embedder cannot be used now")
        return opened.questions


def _keys(opened: OpenStore, view: UserView | None) -> list[str]:
    """Arena keys of everything that a view has."""
    if view is None:
        return []
    tables = view.memory.encodings.values()
    return [f"{opened.entry.name}/{s.key}" for table in tables for s in table.values()]


def _embed(
    loop: asyncio.AbstractEventLoop, questions: EmbeddingBatcher, texts: list[str]
) -> npt.NDArray[np.float32]:
    """Embeds facts from a writing thread, together with the questions of chat requests."""

    async def some(part: list[str]) -> list[npt.NDArray[np.float32]]:
        return list(await asyncio.gather(*map(questions.embed, part)))

    rows: list[npt.NDArray[np.float32]] = []
    # A batch at a time: questions that come meanwhile wait for one batch, not for all of them.
    for first in range(0, len(texts), MAX_BATCH):
        part = texts[first : first + MAX_BATCH]
        rows += _wait_for(asyncio.run_coroutine_threadsafe(some(part), loop), loop)
    return np.stack(rows)


def _wait_for(future: Future[_R], loop: asyncio.AbstractEventLoop) -> _R:
    """Waits in a thread, but not for a loop that has ended: the process could not end then."""
    while True:
        wait([future], timeout=LOOK_SECONDS)
        if future.done():
            return future.result()
        if not loop.is_running():
            future.cancel()
            raise StoreError("the server is ending")


def unavailable(what: str) -> Refusal:
    """503 for what may work later."""
    headers = {"retry-after": "10"}
    return Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE, f"field 'store': {what}; try again", "store", headers
    )


def precondition_failed() -> Refusal:
    """412 for a version that is no longer the newest."""
    return Refusal(
        HTTPStatus.PRECONDITION_FAILED,
        "header 'If-Match': the memory is at another version; read it again",
        "If-Match",
    )


def quota_exceeded() -> Refusal:
    """403 for more facts, or bytes, than the quota allows."""
    return Refusal(
        HTTPStatus.FORBIDDEN,
        "field 'facts': the quota of this memory would be passed and nothing was written; delete "
        "facts first",
        "facts",
    )
