"""``inferscale bench ttft``: time to first token over k, against text and against the floor.

For each k and repetition a question that was asked nowhere else is sent three times: as text, with
injection, and with injection once more. The last finds its KV in vLLM's own prefix cache, so that
nothing is left to inject but the unfilled last block: no way of serving these tokens is faster, and
what it takes is the floor.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from inferscale_runtime.bench.client import Answer, Ask, ChatClient
from inferscale_runtime.bench.report import Row
from inferscale_runtime.bench.server import say
from inferscale_runtime.bench.stats import ratio, summary
from inferscale_runtime.bench.workload import Workload

COLUMNS = (
    ("k", "k"),
    ("prompt_tokens", "prompt tokens"),
    ("text_p50_ms", "text ms"),
    ("text_p95_ms", "p95"),
    ("injected_p50_ms", "injected ms"),
    ("injected_p95_ms", "p95"),
    ("floor_p50_ms", "floor ms"),
    ("floor_p95_ms", "p95"),
    ("mem0_p50_ms", "mem0 ms"),
    ("text_per_injected", "text/injected"),
    ("injected_per_floor", "injected/floor"),
)

Extra = Callable[[ChatClient, Ask], Awaitable[float]]
"""Another way to answer a request; gives its time to first token in seconds."""


async def warm_up(client: ChatClient, workload: Workload, ks: Sequence[int]) -> None:
    """Brings every user's facts into the arena and every code path into use."""
    say(f"warming up {len(workload.users)} users")
    for user in workload.users:
        # The first request may go as text, when reading from disk takes longer than it waits.
        await client.ask(Ask(user, "Good morning!", max(ks), "injected"), check=False)
    for k in ks:
        for mode in ("text", "injected"):
            await client.ask(Ask(workload.users[0], "Good evening!", k, mode), check=False)


async def measure(
    client: ChatClient,
    workload: Workload,
    ks: Sequence[int],
    repeats: int,
    extra: Extra | None = None,
) -> list[Row]:
    """Measures all ks.

    Args:
        client: One connection; requests go one after the other.
        workload: At least ``repeats`` questions in all, for each k.
        ks: Facts per request.
        repeats: Measurements of each k.
        extra: Another baseline, or None.

    Returns:
        One row for each k.
    """
    rows = []
    questions = {user: iter(asked) for user, asked in workload.questions.items()}
    for k in ks:
        say(f"k={k}: {repeats} questions")
        times: dict[str, list[float]] = defaultdict(list)
        tokens: list[int] = []
        asked: list[Ask] = []
        for number in range(repeats):
            user = workload.users[number % len(workload.users)]
            ask = Ask(user, next(questions[user]), k, "injected")
            # The order alternates, so that a slow moment does not favour one of them.
            if number % 2:
                tokens.append(await _text(client, ask, times))
                await _injected(client, ask, times)
            else:
                await _injected(client, ask, times)
                tokens.append(await _text(client, ask, times))
            asked.append(ask)
        # Afterwards: the threads of another library would disturb what comes next to it.
        if extra is not None:
            times["mem0"] = [await extra(client, ask) for ask in asked]
        rows.append(_row(k, tokens, times))
    return rows


async def _text(client: ChatClient, ask: Ask, times: dict[str, list[float]]) -> int:
    answer = await client.ask(Ask(ask.user, ask.question, ask.k, "text"))
    times["text"].append(answer.ttft_s)
    return answer.prompt_tokens


async def _injected(client: ChatClient, ask: Ask, times: dict[str, list[float]]) -> None:
    for name in ("injected", "floor"):
        answer: Answer = await client.ask(ask)
        times[name].append(answer.ttft_s)


def _row(k: int, tokens: Sequence[int], times: dict[str, list[float]]) -> Row:
    row: Row = {"k": k, "prompt_tokens": round(statistics.median(tokens))}
    row["repeats"] = len(tokens)
    for name, seconds in times.items():
        row |= summary(seconds, name)
    row["text_per_injected"] = ratio(row["text_p50_ms"], row["injected_p50_ms"])
    row["injected_per_floor"] = ratio(row["injected_p50_ms"], row["floor_p50_ms"])
    # Pairs of the same question moments apart: the machine's slow moments cancel.
    row["injected_minus_floor_p50_ms"] = round(
        statistics.median(
            (a - b) * 1e3 for a, b in zip(times["injected"], times["floor"], strict=True)
        ),
        2,
    )
    return row


def growth_note(rows: Sequence[Row]) -> str:
    """How TTFT grows from the smallest to the largest k."""
    low, high = min(rows, key=lambda r: int(r["k"])), max(rows, key=lambda r: int(r["k"]))
    parts = [
        f"{name} {100 * (high[f'{name}_p50_ms'] / low[f'{name}_p50_ms'] - 1):+.0f} %"
        for name in ("text", "injected", "floor")
    ]
    return f"growth from k={low['k']} to k={high['k']}: {', '.join(parts)}"
