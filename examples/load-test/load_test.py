"""Time to first token of a served model, over facts (k) and users at once.

    pip install -r requirements.txt
    python load_test.py --url http://127.0.0.1:8000 --prepare 60
    python load_test.py --url http://127.0.0.1:8000 --users 1,10,50,100 --k 5,10,20,50

`--prepare` writes that many made-up facts for each user through the memory API (`--clean` deletes
the users again); they are served as text until they are encoded. Without it the users must have
facts already. Each of the users at once is another user, and no question is asked twice, so the
prefix cache helps nobody. A time runs from sending the request to the first token of its stream.

A request that was refused, failed, broke off or gave no token is an error: it is counted in its
row, listed by kind below the table, and makes the exit status 1. Percentiles are over the rest, and
are values that were measured (nearest rank).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import httpx

HEADINGS = ("k", "users", "mode", "requests", "errors", "as text", "p50 ms", "p95 ms", "p99 ms",
            "requests/s")  # fmt: skip
PLACES = ("Bergen", "Lisbon", "Krakow", "Ghent", "Tallinn", "Porto", "Trieste", "Galway")
THINGS = ("a blue sailing boat", "an old piano", "a racing bicycle", "a wooden telescope",
          "a box of vinyl records", "a second-hand camera", "a small greenhouse")  # fmt: skip


@dataclass
class Step:
    """One row of the table.

    Attributes:
        k: Facts for each request.
        users: Users at once.
        mode: ``injected`` or ``text``.
        times: Seconds to the first token of each request that had one.
        errors: Kind -> how many.
        as_text: Requests that asked for injection and went as text.
        seconds: Duration of the step.
    """

    k: int
    users: int
    mode: str
    times: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    as_text: int = 0
    seconds: float = 0.0

    def cells(self) -> list[str]:
        """The row as text."""
        failed = self.errors.total()
        done = len(self.times)
        shown = [str(v) for v in (self.k, self.users, self.mode, done + failed, failed)]
        shown.append(str(self.as_text))
        shown += [f"{1e3 * percentile(self.times, p):.1f}" if done else "-" for p in (50, 95, 99)]
        return [*shown, f"{done / self.seconds:.2f}" if self.seconds else "-"]


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that this share of the values does not exceed."""
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


class Target:
    """The server under test."""

    def __init__(self, client: httpx.AsyncClient, model: str, max_tokens: int) -> None:
        self.client, self.model, self.max_tokens = client, model, max_tokens
        self.asked = 0

    async def ask(self, user: str, step: Step) -> None:
        """Sends one request and notes in the step how it went."""
        self.asked += 1
        place = PLACES[self.asked % len(PLACES)]
        body = {
            "model": self.model,
            # Unlike any other, also of an earlier run.
            "messages": [
                {"role": "user", "content": f"{secrets.token_hex(4)}: who has a boat in {place}?"}
            ],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "memory": {"user": user, "k": step.k, "mode": step.mode},
        }
        started = time.perf_counter()
        first: float | None = None
        ended = False
        try:
            async with self.client.stream(
                "POST", "/v1/chat/completions", json=body, headers={"x-user-id": quote(user)}
            ) as response:
                if not response.is_success:
                    step.errors[f"HTTP {response.status_code}"] += 1
                    return
                used = json.loads(response.headers.get("x-inferscale-memory", "{}"))
                async for line in response.aiter_lines():
                    ended = ended or line == "data: [DONE]"
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        step.errors["error in the stream"] += 1
                        return
                    choices = chunk.get("choices") or [{}]
                    if first is None and choices[0].get("delta", {}).get("content"):
                        first = time.perf_counter() - started
        except (httpx.HTTPError, ValueError) as error:
            step.errors[type(error).__name__] += 1
            return
        if first is None or not ended:
            step.errors["no token" if ended else "broke off"] += 1
            return
        step.times.append(first)
        step.as_text += step.mode == "injected" and used.get("mode") != "injected"

    async def run(self, step: Step, users: Sequence[str], requests: int) -> None:
        """Runs a step: each user asks one question after the other."""

        async def asking(user: str) -> None:
            for _ in range(requests):
                await self.ask(user, step)

        started = time.perf_counter()
        await asyncio.gather(*(asking(user) for user in users[: step.users]))
        step.seconds = time.perf_counter() - started

    async def prepare(self, users: Sequence[str], facts: int) -> None:
        """Writes made-up facts for each user."""
        for user in users:
            texts = [
                f"In {1990 + n % 36} {user}'s friend number {n} from {PLACES[n % len(PLACES)]} "
                f"bought {THINGS[n % len(THINGS)]} for {20 + 7 * n} euros."
                for n in range(facts)
            ]
            body = {"facts": [{"id": f"load-{n}", "text": text} for n, text in enumerate(texts)]}
            url = f"/inferscale/v1/users/{quote(user, safe='')}/facts"
            (await self.client.put(url, json=body)).raise_for_status()

    async def clean(self, users: Sequence[str]) -> None:
        """Deletes the users."""
        for user in users:
            url = f"/inferscale/v1/users/{quote(user, safe='')}"
            (await self.client.delete(url)).raise_for_status()


def table(steps: Sequence[Step]) -> str:
    """The table and the errors by kind."""
    lines = [list(HEADINGS), *(step.cells() for step in steps)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(HEADINGS))]
    text = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    errors = sum((step.errors for step in steps), Counter[str]())
    text += [f"errors: {count} x {kind}" for kind, count in errors.most_common()]
    return "\n".join(text)


async def load(arguments: argparse.Namespace) -> int:
    """Runs all steps; 1 when any request failed."""
    key = os.environ.get("INFERSCALE_API_KEY")
    most = max(arguments.users)
    users = [f"{arguments.prefix}{number:03d}" for number in range(most)]
    client = httpx.AsyncClient(
        base_url=arguments.url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=arguments.timeout,
        limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
    )
    async with client:
        models = (await client.get("/v1/models")).raise_for_status().json()
        target = Target(client, models["data"][0]["id"], arguments.max_tokens)
        if arguments.clean:
            await target.clean(users)
            return 0
        if arguments.prepare:
            await target.prepare(users, arguments.prepare)
        if arguments.warm_up:
            # Brings every user's facts into memory; not part of any row.
            warm = Step(max(arguments.k), most, "injected")
            await target.run(warm, users, 1)
        steps = []
        for k in arguments.k:
            for number in arguments.users:
                for mode in arguments.modes:
                    steps.append(Step(k, number, mode))
                    print(f"k={k} users={number} {mode}", file=sys.stderr, flush=True)
                    await target.run(steps[-1], users, arguments.requests)
    print(table(steps))
    return 1 if any(step.errors for step in steps) else 0


def numbers(text: str) -> list[int]:
    """An argument such as ``5,10,50``."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise ValueError
    return values


def main() -> int:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="The API key, if there is one, comes from the variable INFERSCALE_API_KEY.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--k", type=numbers, default=[5, 10, 20, 50])
    parser.add_argument("--users", type=numbers, default=[1, 10, 50, 100], help="users at once")
    parser.add_argument("--requests", type=int, default=5, help="of each user in each row")
    parser.add_argument("--modes", type=lambda t: t.split(","), default=["text", "injected"])
    parser.add_argument("--max-tokens", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request")
    parser.add_argument("--prefix", default="load-", help="users are PREFIX000, PREFIX001 and on")
    parser.add_argument("--prepare", type=int, metavar="FACTS", help="write facts for each user")
    parser.add_argument("--clean", action="store_true", help="delete the users and end")
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false")
    return asyncio.run(load(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
