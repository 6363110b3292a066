"""InferScale as the memory of a LangChain application.

`memory_model` is a chat model that remembers: the server finds the user's facts itself and injects
them, so no retrieval step stands in the chain. `InferScaleRetriever` finds facts for chains that
want to see them, and `InferScaleMemory` writes and forgets them.
"""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import quote

import httpx
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_openai import ChatOpenAI
from pydantic import ConfigDict


def memory_model(
    url: str, user: str, *, key: str = "none", session: str | None = None, **options: Any
) -> ChatOpenAI:
    """A chat model with this user's memory.

    Args:
        url: The server, for example ``http://127.0.0.1:8000``.
        user: Whose memory.
        key: API key of the server; any text where it asks for none.
        session: Name of the chat, so that its facts stay in place from turn to turn.
        **options: Further ones of ``ChatOpenAI``; the server is asked for an absent ``model``.
    """
    memory: dict[str, Any] = {"user": user}
    if session is not None:
        memory["session"] = session
    if "model" not in options:
        answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        answer.raise_for_status()
        options["model"] = answer.json()["data"][0]["id"]
    return ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        # A router in front of several servers keeps a user at one of them by this header.
        default_headers={"x-user-id": quote(user)},
        extra_body={"memory": memory},
        **options,
    )


class InferScaleMemory:
    """The facts of one user, through the memory API.

    Args:
        url: The server.
        user: Whose facts.
        key: API key of the server.
    """

    def __init__(self, url: str, user: str, key: str = "none") -> None:
        self._client = httpx.Client(
            base_url=f"{url}/inferscale/v1/users/{quote(user, safe='')}",
            headers={"Authorization": f"Bearer {key}", "x-user-id": quote(user)},
            timeout=60,
        )

    def remember(self, *texts: str) -> list[str]:
        """Writes facts and gives their ids; the very next answer knows them."""
        body = {"facts": [{"text": text} for text in texts]}
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        answer = self._client.put("/facts", json=body, headers=headers)
        answer.raise_for_status()
        written = answer.json()
        return [*written["created"], *written["updated"], *written["unchanged"]]

    def forget(self, fact_id: str) -> None:
        """Deletes a fact; it is never used again."""
        self._client.delete(f"/facts/{quote(fact_id, safe='')}").raise_for_status()

    def search(self, query: str, k: int) -> list[dict[str, Any]]:
        """The k facts nearest to a text, best first, with ``id``, ``text`` and ``score``."""
        answer = self._client.post("/search", json={"query": query, "k": k})
        answer.raise_for_status()
        return list(answer.json()["facts"])


class InferScaleRetriever(BaseRetriever):
    """Finds a user's facts as documents."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    memory: InferScaleMemory
    """Whose facts."""
    k: int = 5
    """How many."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return [
            Document(id=fact["id"], page_content=fact["text"], metadata={"score": fact["score"]})
            for fact in self.memory.search(query, self.k)
        ]
