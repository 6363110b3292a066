"""A client of the chat route that sends the whole conversation each time."""

from __future__ import annotations

from typing import Any

import httpx


class Chat:
    """A client that sends the whole conversation each time."""

    def __init__(self, client: httpx.Client, user: str, session: str | None, mode: str) -> None:
        self.client = client
        self.messages: list[dict[str, str]] = []
        self.memory: dict[str, Any] = {"user": user, "k": 100, "order": "stored", "mode": mode}
        if session is not None:
            self.memory["session"] = session

    def say(self, question: str) -> Any:
        self.messages.append({"role": "user", "content": question})
        body = {
            "model": "smollm2",
            "messages": self.messages,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "memory": self.memory,
        }
        response = self.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        text = answer["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": text})
        return answer


def tokens(answer: Any) -> list[str]:
    return [item["token"] for item in answer["choices"][0]["logprobs"]["content"]]


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
