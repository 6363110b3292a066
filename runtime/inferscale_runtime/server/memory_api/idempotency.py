"""``Idempotency-Key``: a request that is sent again gets the answer of the first.

The answers are kept in the memory of one replica for a while. A repetition that reaches another
one is carried out again, which changes nothing: its content is in the store already, and ids made
by the server are made from the key.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import Response

from inferscale_runtime.server.refusal import Refusal

MAX_ENTRIES = 10_000
KEPT_SECONDS = 86_400.0
PARAM = "Idempotency-Key"


@dataclass(slots=True)
class _Entry:
    user: str
    body: bytes
    at: float
    answer: asyncio.Future[Response]


def made_id(scope: str, index: int) -> str:
    """The id of a fact that came without one (pure): the same for the same key."""
    return hashlib.sha256(f"{scope}\x00{index}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Idempotency:
    """Remembers answers.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def once(
        self, user: str, scope: str, body: bytes, carry_out: Callable[[], Awaitable[Response]]
    ) -> Response:
        """Carries a request out, or gives the answer of the first of its kind.

        Args:
            user: Whose memory; see :meth:`forget`.
            scope: Caller, method, path and key.
            body: The request's body.
            carry_out: Does it; a failure is not remembered.

        Raises:
            Refusal: 422 when the key was used for another body.
        """
        now = self._clock()
        while self._entries:
            oldest = next(iter(self._entries.values()))
            full = len(self._entries) >= MAX_ENTRIES and oldest.answer.done()
            if not full and now - oldest.at < KEPT_SECONDS:
                break
            self._entries.popitem(last=False)
        digest = hashlib.sha256(body).digest()
        found = self._entries.get(scope)
        if found is not None and found.body != digest:
            raise Refusal(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"header '{PARAM}': it was used for another body; use a new key",
                PARAM,
            )
        if found is None:
            answer: asyncio.Future[Response] = asyncio.ensure_future(carry_out())
            self._entries[scope] = _Entry(user, digest, now, answer)
            answer.add_done_callback(lambda done: self._settle(scope, done))
        else:
            answer = found.answer
        # A client that goes away must not undo the work that another one waits for.
        return await asyncio.shield(answer)

    def _settle(self, scope: str, done: asyncio.Future[Response]) -> None:
        if done.cancelled() or done.exception() is not None or done.result().status_code >= 400:
            self._entries.pop(scope, None)

    def forget(self, user: str) -> None:
        """Forgets the answers about an erased user, but for those still to be given."""
        entries = self._entries
        for scope in [s for s, e in entries.items() if e.user == user and e.answer.done()]:
            del entries[scope]
