"""Writers and readers at one server, and what they saw."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

USER = "soak"


@dataclass
class Seen:
    """What happened.

    Attributes:
        acknowledged: Fact id -> text that a write was acknowledged for and that is still there.
        deleted: Fact id -> when its deletion was acknowledged.
        writes: Acknowledged writes.
        answers: Answers of chat requests.
        errors: Whatever was not as it should be.
    """

    acknowledged: dict[str, str] = field(default_factory=dict)
    deleted: dict[str, float] = field(default_factory=dict)
    writes: int = 0
    answers: int = 0
    errors: list[str] = field(default_factory=list)


async def soak(
    url: str, headers: dict[str, str], seconds: float, writes: int, readers: int
) -> Seen:
    """One writer and many readers of one user.

    Args:
        url: Of the server.
        headers: With the credentials.
        seconds: How long at least.
        writes: How many writes the writer spreads over that time.
        readers: How many readers.
    """
    seen, end = Seen(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=readers + 5)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=300, limits=limits
    ) as client:
        await _put(client, seen, "first", "the first fact")
        stop = asyncio.Event()
        reading = [asyncio.create_task(_read(client, seen, n, stop)) for n in range(readers)]
        await _write(client, seen, writes, end)
        stop.set()
        await asyncio.gather(*reading)
    return seen


async def _put(client: httpx.AsyncClient, seen: Seen, name: str, text: str) -> None:
    answer = await client.put(f"/inferscale/v1/users/{USER}/facts/{name}", json={"text": text})
    if answer.status_code not in (200, 201):
        seen.errors.append(f"put {name}: {answer.status_code} {answer.text}")
        return
    seen.acknowledged[name] = text
    seen.writes += 1


async def _write(client: httpx.AsyncClient, seen: Seen, writes: int, end: float) -> None:
    """Of five writes, three add a fact, one corrects one, one forgets one."""
    begin = time.monotonic()
    for n in range(1, writes):
        names = [name for name in seen.acknowledged if name != "first"]
        if n % 5 == 3 and names:
            await _put(client, seen, names[n % len(names)], f"corrected text number {n}")
        elif n % 5 == 4 and names:
            name = names[n * 7 % len(names)]
            answer = await client.delete(f"/inferscale/v1/users/{USER}/facts/{name}")
            if answer.status_code != 200:
                seen.errors.append(f"delete {name}: {answer.status_code} {answer.text}")
                continue
            seen.deleted[name] = time.monotonic()
            del seen.acknowledged[name]
            seen.writes += 1
        else:
            await _put(client, seen, f"fact-{n}", f"text number {n} of the soak")
        pause = begin + n * (end - begin) / writes - time.monotonic()
        await asyncio.sleep(max(0.0, pause))


async def _read(client: httpx.AsyncClient, seen: Seen, reader: int, stop: asyncio.Event) -> None:
    for n in itertools.count():
        if stop.is_set():
            return
        body: dict[str, Any] = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": f"Reader {reader} asks for number {n}."}],
            "max_tokens": 2,
            "memory": {"user": USER, "k": 10, "explain": True},
        }
        sent = time.monotonic()
        known = set(seen.acknowledged)
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            seen.errors.append(f"chat: {answer.status_code} {answer.text}")
            continue
        seen.answers += 1
        memory = answer.json()["usage"]["memory"]
        stale = [i for i in memory["fact_ids"] if seen.deleted.get(i, sent) < sent]
        if stale:
            seen.errors.append(f"answer from deleted facts {stale}")
        if known and memory["facts"] == 0:
            seen.errors.append("answer without memory")
