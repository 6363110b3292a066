"""What the scheduler may do to a request with a claim, and claims that must not be believed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.checkpoints import make_checkpoint
from tests.integration.engine import (
    BLOCK,
    Memory,
    Result,
    Served,
    assert_same,
    max_difference,
    new_salt,
    random_ids,
    serve,
    shared_preamble,
)

from inferscale_runtime.tiers.slab import LEASE_DONE, LEASE_FREE

pytestmark = pytest.mark.vllm

USERS = 6
TAIL = random_ids(random.Random(5), 19)


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    return make_checkpoint("llama", checkpoints)


@pytest.fixture(scope="module")
def memories(model: Path) -> list[Memory]:
    return shared_preamble(model, USERS)


@pytest.fixture(scope="module")
def served(model: Path, memories: list[Memory], tmp_path_factory: Any) -> Iterator[Served]:
    """An engine with chunked prefill in small steps and room for all."""
    with serve(
        model, tmp_path_factory.mktemp("run"), max_num_batched_tokens=64, max_num_seqs=8
    ) as engine:
        yield engine


@pytest.fixture
def keys(served: Served, memories: list[Memory]) -> Iterator[list[str]]:
    """Keys of the first user's memory; afterwards only preambles may be pinned."""
    found = served.put("a", memories[0])
    yield found
    served.lease([])  # any call collects the leases that have ended
    assert served.arena.pinned_rows == len(memories[0].pieces[0])


def put_once(served: Served, prefix: str, memory: Memory) -> list[str]:
    """Like ``put``, but the shared preamble ``a0`` stays the only pin."""
    found = ["a0"]
    for index in range(1, len(memory.pieces)):
        found.append(f"{prefix}{index}")
        assert served.arena.put(found[-1], memory.kv[index])
    return found


def prompt(memory: Memory, tail: tuple[int, ...] = TAIL) -> tuple[int, ...]:
    return (*memory.token_ids, *tail)


# These two have an engine of their own, so they run before ``served`` is opened.
def run_users(
    served: Served, memories: list[Memory], max_tokens: int
) -> tuple[list[Result], list[Result]]:
    """All users at once, as text and injected."""
    served.put("a", memories[0])
    requests, leases, texts = [], [], []
    for user, memory in enumerate(memories):
        user_keys = put_once(served, f"user{user}-", memory)
        ids, salt = prompt(memory), new_salt()
        lease = served.lease(user_keys)
        leases.append(lease)
        requests.append(
            served.request(ids, salt, served.seal(lease, ids, salt), max_tokens=max_tokens)
        )
        texts.append(served.request(ids, new_salt(), max_tokens=max_tokens))
    expected = [served.run([text])[0] for text in texts]
    served.queries.clear()
    results = served.run(requests)
    for lease in leases:
        served.arena.end(lease, submitted=True)
        assert served.leases[lease.slot, 1] == LEASE_FREE
    return results, expected


def test_preemption_and_resume(model: Path, memories: list[Memory], tmp_path: Path) -> None:
    """Without prefix caching, so that a resumed request is loaded again from its start."""
    preempted = []
    users = memories[:4]
    # A request needs about 9 blocks at first and 12 at its end: three start, two end.
    with serve(
        model,
        tmp_path,
        num_gpu_blocks_override=32,
        max_model_len=512,
        enable_prefix_caching=False,
    ) as served:
        scheduler = served.llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def spy(request: Any, *args: Any, **kwargs: Any) -> None:
            if request.kv_transfer_params:
                preempted.append(request.request_id)
            preempt(request, *args, **kwargs)

        scheduler._preempt_request = spy
        results, expected = run_users(served, users, max_tokens=90)
        assert preempted
        assert len(served.loads) == len(users) + len(preempted)
        for result, text in zip(results, expected, strict=True):
            assert_same(result, text)


def test_byte_cap_defers_but_serves_all(
    model: Path, memories: list[Memory], tmp_path: Path
) -> None:
    rows = len(memories[0].token_ids)
    per_request = rows * memories[0].kv[0][0].numel() * torch.float32.itemsize
    assert per_request * USERS > 1 << 20
    with serve(model, tmp_path, max_step_bytes=1 << 20) as served:
        results, expected = run_users(served, memories, max_tokens=16)
        assert any(answer is None for _, answer in served.queries), "nothing was deferred"
        for result, text in zip(results, expected, strict=True):
            assert_same(result, text)


def test_repeat_uses_the_prefix_cache(
    served: Served, keys: list[str], memories: list[Memory]
) -> None:
    ids = prompt(memories[0])
    assert len(memories[0].token_ids) % BLOCK, "the claim must end inside a block"
    expected = served.text(ids)
    salt = new_salt()
    first = served.inject(keys, ids, salt=salt)
    loads = len(served.loads)
    second = served.inject(keys, ids, salt=salt)
    assert_same(first, expected)
    assert_same(second, expected)
    whole = len(ids) // BLOCK * BLOCK
    assert second.cached >= whole - BLOCK
    # What is in the cache is not injected again: only the claim's last partial block is, if any.
    assert sum(load.last - load.first for load in served.loads[loads:]) < BLOCK


def test_longer_claim_on_a_cached_prefix(
    served: Served, keys: list[str], memories: list[Memory]
) -> None:
    """A second turn: the load starts behind the cached blocks, inside a segment."""
    ids = prompt(memories[0])
    salt = new_salt()
    served.inject(keys[:5], ids[: sum(map(len, memories[0].pieces[:5])) + 1], salt=salt)
    result = served.inject(keys, ids, salt=salt)
    assert served.loads[-1].first >= BLOCK
    assert served.loads[-1].first % BLOCK == 0
    assert_same(result, served.text(ids))


def test_two_salts_do_not_mix(served: Served, keys: list[str], memories: list[Memory]) -> None:
    """Two users with the same fact text but other KV."""
    ids = prompt(memories[0])
    scaled = replace(memories[0], kv=tuple(-kv for kv in memories[0].kv))
    others = put_once(served, "negated", scaled)
    expected = served.text(ids)
    assert_same(served.inject(keys, ids, salt="u1"), expected)
    other = served.inject(others, ids, salt="u2")
    assert max_difference(other, expected) > 1e-2
    again = served.inject(keys, ids, salt="u1")
    assert again.cached
    assert_same(again, expected)
    assert_same(served.inject(others, ids, salt="u2"), other)


def test_chunked_prefill_of_a_long_tail(
    served: Served, keys: list[str], memories: list[Memory]
) -> None:
    ids = prompt(memories[0], random_ids(random.Random(6), 300))
    loads = len(served.loads)
    result = served.inject(keys, ids)
    assert len(served.loads) == loads + 1, "later chunks must not load again"
    assert_same(result, served.text(ids))


def test_claim_of_the_whole_prompt_is_capped(
    served: Served, keys: list[str], memories: list[Memory]
) -> None:
    """The last token is always computed: a claim of all goes as text, of all but one is used."""
    ids = memories[0].token_ids
    salt = new_salt()
    lease = served.lease(keys)
    result = served.run([served.request(ids, salt, served.seal(lease, ids, salt))])[0]
    # The engine refused it, so it never took the lease; nothing else would end it for minutes.
    served.arena.end(lease, submitted=False)
    assert_same(result, served.text(ids))

    almost = ids + TAIL[:1]  # everything but the last token
    assert_same(served.inject(keys, almost), served.text(almost))
    assert served.loads[-1].last == len(almost) - 1


@pytest.mark.parametrize("kind", ["code", "runs", "prompt", "salt", "no salt", "malformed"])
def test_forged_claims_go_as_text(
    kind: str, served: Served, keys: list[str], memories: list[Memory]
) -> None:
    ids: tuple[int, ...] = prompt(memories[0])
    salt: str | None = new_salt()
    lease = served.lease(keys)
    sealed = copy.deepcopy(served.seal(lease, ids, str(salt)))
    if kind == "code":
        sealed["code"] = "0" * 64
    elif kind == "runs":
        sealed["runs"][1][0] += 1
    elif kind == "prompt":
        ids = (ids[0] + 1, *ids[1:])
    elif kind == "salt":
        salt = new_salt()
    elif kind == "no salt":
        salt = None
    else:
        sealed = {"n": 10, "runs": [[-5, 10]], "lease": "x", "code": None}
    loads = len(served.loads)
    result = served.run([served.request(ids, salt, sealed)])[0]
    assert len(served.loads) == loads
    assert_same(result, served.text(ids))
    served.arena.end(lease, submitted=False)
    assert served.leases[lease.slot, 1] == LEASE_FREE


def test_lease_taken_back_goes_as_text(
    served: Served, keys: list[str], memories: list[Memory]
) -> None:
    ids, salt = prompt(memories[0]), new_salt()
    lease = served.lease(keys)
    request = served.request(ids, salt, served.seal(lease, ids, salt))
    served.arena.end(lease, submitted=False)
    loads = len(served.loads)
    assert_same(served.run([request])[0], served.text(ids))
    assert len(served.loads) == loads
    # Nor may the late request touch the slot's next lease.
    following = served.lease(keys)
    assert following.slot == lease.slot
    served.run([request])
    assert served.leases[following.slot, 1] != LEASE_DONE
    assert len(served.loads) == loads
    served.arena.end(following, submitted=False)


def test_abort_frees_the_leases(served: Served, keys: list[str], memories: list[Memory]) -> None:
    """Aborted while running, and while still waiting."""
    ids = prompt(memories[0])
    engine = served.llm.llm_engine
    leases = []
    for index in range(12):  # max_num_seqs is 8
        salt = new_salt()
        lease = served.lease(keys)
        engine_prompt, params = served.request(
            ids, salt, served.seal(lease, ids, salt), max_tokens=200
        )
        engine.add_request(f"abort{index}", engine_prompt, params)
        leases.append(lease)
    for _ in range(4):
        engine.step()
    assert served.arena.pinned_rows == len(memories[0].token_ids)
    engine.abort_request([f"abort{index}" for index in range(12)])
    while engine.has_unfinished_requests():
        engine.step()
    for lease in leases:
        served.arena.end(lease, submitted=True)
    assert all(served.leases[lease.slot, 1] == LEASE_FREE for lease in leases)
    assert_same(served.inject(keys, ids), served.text(ids))
