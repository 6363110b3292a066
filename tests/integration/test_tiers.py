"""A real engine over an arena that holds a quarter of the store: right answers, hits, no leak."""

from __future__ import annotations

import json
import os
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integration.checkpoints import make_checkpoint
from tests.integration.engine import (
    Memory,
    Result,
    Served,
    assert_same,
    new_salt,
    random_ids,
    serve,
    shared_preamble,
)

from inferscale_runtime.tiers.leases import Lease
from inferscale_runtime.tiers.plan_file import PlanFollower

pytestmark = pytest.mark.vllm

USERS = 40
# The whole trace takes minutes: INFERSCALE_TRACE_REQUESTS=2000.
REQUESTS = int(os.environ.get("INFERSCALE_TRACE_REQUESTS", "400"))
AT_ONCE = 4
TAIL = random_ids(random.Random(5), 19)


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    return make_checkpoint("llama", checkpoints)


@pytest.fixture(scope="module")
def memories(model: Path) -> list[Memory]:
    return shared_preamble(model, USERS)


@pytest.fixture(scope="module")
def capacity(memories: list[Memory]) -> int:
    """A quarter of all facts, in rows, beside the preamble."""
    preamble = len(memories[0].pieces[0])
    return sum(len(memory.token_ids) - preamble for memory in memories) // 4


@pytest.fixture(scope="module")
def served(
    model: Path, memories: list[Memory], capacity: int, tmp_path_factory: Any
) -> Iterator[Served]:
    rows = capacity + len(memories[0].pieces[0])
    with serve(model, tmp_path_factory.mktemp("run"), rows=rows, max_num_seqs=8) as engine:
        assert engine.arena.put("preamble", memories[0].kv[0], pin=True)
        yield engine


@pytest.fixture(scope="module")
def expected(served: Served, memories: list[Memory]) -> list[Result]:
    """Each user's answer with everything as text."""
    return [served.text((*memory.token_ids, *TAIL), max_tokens=3) for memory in memories]


def keys_of(user: int, memory: Memory) -> list[str]:
    return [f"{user}/{index}" for index in range(1, len(memory.pieces))]


def stage(served: Served, user: int, memory: Memory) -> Lease:
    """What the server does before a request: look up, read what is missing, pin."""
    keys = keys_of(user, memory)
    found = served.arena.look_up(keys, store="main")
    for key, kv in zip(keys, memory.kv[1:], strict=True):
        if key not in found:
            assert served.arena.put(key, kv, store="main")
    return served.lease(["preamble", *keys])


def sealed(served: Served, lease: Lease, memory: Memory) -> Any:
    ids, salt = (*memory.token_ids, *TAIL), new_salt()
    return served.request(ids, salt, served.seal(lease, ids, salt), max_tokens=3)


def offline_lru(trace: Sequence[int], memories: list[Memory], capacity: int) -> float:
    """Hit rate of a plain LRU over the same facts, one request after the other."""
    cache: OrderedDict[str, int] = OrderedDict()
    used = hits = total = 0
    for user in trace:
        for key, piece in zip(
            keys_of(user, memories[user]), memories[user].pieces[1:], strict=True
        ):
            total += 1
            if key in cache:
                hits += 1
                cache.move_to_end(key)
                continue
            while used + len(piece) > capacity:
                used -= cache.popitem(last=False)[1]
            cache[key] = len(piece)
            used += len(piece)
    return hits / total


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_zipf_users_in_a_quarter_of_the_room(
    served: Served, memories: list[Memory], expected: list[Result], capacity: int
) -> None:
    weights = [1 / (rank + 1) for rank in range(USERS)]
    trace = random.Random(11).choices(range(USERS), weights, k=REQUESTS)
    preamble = len(memories[0].pieces[0])
    before = served.arena.stats.snapshot().get("main")
    assert before is None, "nothing was asked for yet"
    memory_after_warm_up = 0
    for first in range(0, REQUESTS, AT_ONCE):
        users = trace[first : first + AT_ONCE]
        leases = [stage(served, user, memories[user]) for user in users]
        requests = [
            sealed(served, lease, memories[user]) for user, lease in zip(users, leases, strict=True)
        ]
        for user, result in zip(users, served.run(requests), strict=True):
            assert_same(result, expected[user])
        for lease in leases:
            served.arena.end(lease, submitted=True)
        assert served.arena.used_rows <= capacity + preamble
        served.loads.clear()
        served.queries.clear()
        if first == REQUESTS // 4:
            memory_after_warm_up = resident_bytes()
    served.arena.collect()
    assert served.arena.pinned_rows == preamble, "no request holds anything any more"
    assert resident_bytes() < 1.05 * memory_after_warm_up
    figures = served.arena.stats.snapshot()["main"]
    rate = figures.hits / (figures.hits + figures.misses)
    reference = offline_lru(trace, memories, capacity)
    assert 0.2 < reference < 0.95, "the trace tests something"
    assert abs(rate - reference) < 0.05, (rate, reference)


def test_a_plan_that_shrinks_the_arena_interrupts_nothing(
    served: Served, memories: list[Memory], expected: list[Result], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    follower = PlanFollower(str(path), served.arena)
    leases = [stage(served, user, memories[user]) for user in range(AT_ONCE)]
    requests = [sealed(served, lease, memories[n]) for n, lease in enumerate(leases)]
    held = served.arena.pinned_rows
    path.write_text(json.dumps({"dram_bytes": 10 * served.arena.row_bytes}))
    follower.poll()
    assert served.arena.used_rows == held, "what nobody holds went at once"
    for result, wanted in zip(served.run(requests), expected, strict=False):
        assert_same(result, wanted)
    for lease in leases:
        served.arena.end(lease, submitted=True)
    follower.poll()
    assert served.arena.used_rows == len(memories[0].pieces[0]), "only the preamble is left"
    path.write_text(json.dumps({}))
    follower.poll()
    lease = stage(served, 0, memories[0])
    assert_same(served.run([sealed(served, lease, memories[0])])[0], expected[0])
    served.arena.end(lease, submitted=True)
    served.arena.collect()
