"""A chat client that measures time to first token (TTFT); no part of the server is imported."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from inferscale_runtime.bench.report import BenchError

TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        user: Whose memory.
        question: The user's message.
        k: Facts to retrieve.
        mode: ``injected`` or ``text``.
        max_tokens: Exactly this many tokens are made.
        system: System text that goes before the question, or empty.
        session: Name of the chat's session, or None.
        history: Messages before the question.
    """

    user: str
    question: str
    k: int
    mode: str
    max_tokens: int = 1
    system: str = ""
    session: str | None = None
    history: tuple[dict[str, str], ...] = ()

    def body(self, model: str) -> dict[str, Any]:
        """The request's JSON."""
        messages = [*self.history, {"role": "user", "content": self.question}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        memory: dict[str, Any] = {"user": self.user, "k": self.k, "mode": self.mode}
        if self.session is not None:
            memory["session"] = self.session
        return {
            "model": model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "min_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "memory": memory,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        ttft_s: From sending the request to its first token.
        total_s: From sending the request to the end of the stream.
        prompt_tokens: Tokens of the prompt.
        memory: The answer's ``usage.memory``.
        cached_tokens: Prompt tokens that were not computed, 0 where the server does not tell.
        text: The answer.
    """

    ttft_s: float
    total_s: float
    prompt_tokens: int
    memory: dict[str, Any]
    cached_tokens: int = 0
    text: str = ""


class ChatClient:
    """Sends requests over kept-alive connections, as an application's backend does.

    Args:
        url: The server.
        connections: How many requests may be open at once.
        key: API key or token; empty for none.
    """

    def __init__(self, url: str, connections: int = 1, key: str = "") -> None:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=TIMEOUT_S,
            limits=limits,
            trust_env=False,
            headers={"authorization": f"Bearer {key}"} if key else {},
        )
        self.model = ""

    async def __aenter__(self) -> ChatClient:
        response = await self._client.get("/v1/models")
        if not response.is_success:
            raise BenchError(f"{self._client.base_url}/v1/models: HTTP {response.status_code}")
        self.model = str(response.json()["data"][0]["id"])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, ask: Ask, *, check: bool = True) -> Answer:
        """Sends a request and reads the whole answer.

        Args:
            ask: The request.
            check: Refuse an answer that was made in another mode than asked.

        Raises:
            BenchError: The server refused, failed or used another mode.
        """
        try:
            answer = await self._measure(ask)
        except httpx.HTTPError as error:
            raise BenchError(f"the server could not be asked: {type(error).__name__}") from None
        if check and answer.memory.get("mode") != ask.mode:
            raise BenchError(
                f"asked for mode {ask.mode} with k={ask.k}, but the server reports {answer.memory}"
            )
        return answer

    async def _measure(self, ask: Ask) -> Answer:
        first: float | None = None
        usage: dict[str, Any] = {}
        text = ""
        body = ask.body(self.model)
        start = time.perf_counter()
        # A router before the servers goes by it.
        headers = {"x-user-id": quote(ask.user)}
        url = "/v1/chat/completions"
        async with self._client.stream("POST", url, json=body, headers=headers) as response:
            if not response.is_success:
                refusal = (await response.aread())[:300].decode(errors="replace")
                raise BenchError(f"HTTP {response.status_code}: {refusal}")
            async for chunk in _chunks(response):
                if first is None and _has_token(chunk):
                    first = time.perf_counter() - start
                usage = chunk.get("usage") or usage
                text += "".join(c["delta"].get("content") or "" for c in chunk.get("choices") or [])
        total = time.perf_counter() - start
        memory = usage.get("memory")
        if first is None or not isinstance(memory, dict):
            raise BenchError("the answer has no token or no usage.memory: is the plugin loaded?")
        details = usage.get("prompt_tokens_details") or {}
        cached = int(details.get("cached_tokens") or 0)
        return Answer(first, total, int(usage["prompt_tokens"]), memory, cached, text)


async def _chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise BenchError(f"the server answered: {chunk['error']}")
            yield chunk


def _has_token(chunk: dict[str, Any]) -> bool:
    # A token without text of its own (half a character, or the last one) still is a token.
    choices = chunk.get("choices") or []
    return any(c["delta"].get("content") or c.get("finish_reason") for c in choices)
