"""The budget of a pod: the sums, the limits, and what a refusal says."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_runtime.budget import (
    Budget,
    BudgetError,
    BudgetRequest,
    BudgetRow,
    ModelShape,
    compute_budget,
    format_rows,
    kv_bytes_per_token,
    kv_heads_per_gpu,
    model_shape,
)

GIB = 1 << 30
LLAMA_8B = ModelShape(
    num_layers=32, num_attention_heads=32, num_kv_heads=8, head_dim=128, weight_bytes=16 * GIB
)


def request(**changes: Any) -> BudgetRequest:
    fields: dict[str, Any] = {
        "model": LLAMA_8B,
        "gpu_total_bytes": 80 * GIB,
        "max_model_len": 8192,
        "target_seqs": 16,
        "dram_tier_bytes": 50 * GIB,
    }
    return BudgetRequest(**{**fields, **changes})


def row(budget: Budget, term: str) -> int:
    return next(row.bytes for row in budget.rows if row.term == term)


def test_llama_row_is_the_documented_size() -> None:
    assert kv_bytes_per_token(LLAMA_8B) == 131_072
    assert kv_bytes_per_token(LLAMA_8B, 4) == 131_072 // 4
    assert kv_bytes_per_token(LLAMA_8B, 16) == 131_072 // 8, "one replicated head on each rank"


def test_one_gpu_is_divided_by_hand() -> None:
    budget = compute_budget(request())
    assert row(budget, "headroom") == 4 * GIB
    assert row(budget, "KV need") == 16 * GIB
    free = (80 - 4 - 16 - 2) * GIB
    assert budget.gpu_arena_bytes == free // 4
    assert budget.gpu_memory_utilization == 0.7687
    assert budget.kv_pool_bytes == 7687 * 80 * GIB // 10_000 - 18 * GIB
    assert budget.shm_bytes == 60 * GIB
    assert budget.pod_memory_bytes == 64 * GIB
    assert budget.kv_pool_tokens == budget.kv_pool_bytes // (131_072 * 16) * 16


def test_an_explicit_arena_is_kept_and_a_tight_auto_one_shrinks() -> None:
    assert compute_budget(request(gpu_arena=3 * GIB)).gpu_arena_bytes == 3 * GIB
    tight = compute_budget(request(target_seqs=57))
    step = 80 * GIB // 10_000
    assert GIB - step <= tight.gpu_arena_bytes <= GIB
    assert tight.kv_pool_bytes >= 57 * GIB


def test_a_small_tier_keeps_room_for_the_queues_of_vllm() -> None:
    assert compute_budget(request(dram_tier_bytes=GIB)).shm_bytes == GIB + (256 << 20)


def test_tensor_parallel_divides_weights_and_heads() -> None:
    budget = compute_budget(request(tensor_parallel_size=4))
    assert row(budget, "weights") == 4 * GIB
    assert row(budget, "KV need") == 4 * GIB
    assert budget.pod_memory_bytes == (60 + 2 + 8) * GIB


def test_without_gpu_the_pool_and_weights_are_host_memory() -> None:
    budget = compute_budget(request(gpu_total_bytes=None, tensor_parallel_size=2, target_seqs=2))
    assert budget.gpu_memory_utilization is None
    assert budget.gpu_arena_bytes == 0
    assert budget.kv_pool_bytes == GIB, "of each of the two ranks"
    assert budget.pod_memory_bytes == (60 + 16 + 2 + 2 + 4) * GIB


def test_requests_round_up_to_blocks() -> None:
    budget = compute_budget(request(max_model_len=8193, target_seqs=1, block_size=128))
    assert row(budget, "KV need") == 8320 * 131_072


def test_refusal_names_every_term_and_a_mend_that_works() -> None:
    with pytest.raises(BudgetError) as caught:
        compute_budget(request(target_seqs=64))
    message = str(caught.value)
    for part in ("80.00Gi", "headroom 4.00Gi", "weights 16.00Gi", "KV need 64.00Gi", "6.00Gi too"):
        assert part in message
    assert isinstance(caught.value.rows[-1], BudgetRow)
    assert caught.value.rows[-1].term == "GPU arena"
    seqs = int(message.partition("requests to ")[2].split(",")[0])
    assert compute_budget(request(target_seqs=seqs)).kv_pool_bytes >= seqs * GIB
    with pytest.raises(BudgetError):
        compute_budget(request(target_seqs=seqs + 1))
    length = int(message.partition("maxModelLen to ")[2].split(",")[0])
    compute_budget(request(target_seqs=64, max_model_len=length))
    with pytest.raises(BudgetError):
        compute_budget(request(target_seqs=64, max_model_len=length + 16))


def test_a_model_larger_than_the_gpu_offers_no_mend_that_fails() -> None:
    with pytest.raises(BudgetError) as caught:
        compute_budget(request(gpu_total_bytes=12 * GIB))
    assert "maxModelLen" not in str(caught.value)
    assert "larger GPU" in str(caught.value)


def test_an_arena_larger_than_the_gpu_is_refused_by_name() -> None:
    with pytest.raises(BudgetError, match=r"lower tiers\.gpu\.budget"):
        compute_budget(request(gpu_arena=500 * GIB))
    with pytest.raises(BudgetError, match="there is no GPU"):
        compute_budget(request(gpu_total_bytes=None, gpu_arena=GIB))


@pytest.mark.parametrize(
    ("kv_heads", "heads", "size", "expected"),
    [(8, 32, 8, 1), (8, 32, 2, 4), (2, 32, 8, 1), (3, 9, 3, 1), (1, 12, 6, 1)],
)
def test_heads_are_split_or_replicated(kv_heads: int, heads: int, size: int, expected: int) -> None:
    assert kv_heads_per_gpu(kv_heads, heads, size) == expected


@pytest.mark.parametrize(
    ("kv_heads", "heads", "size", "sizes"),
    [(3, 9, 2, "1, 3, 9"), (8, 48, 3, "1, 2, 4, 8, 16"), (6, 24, 4, "1, 2, 3, 6, 12, 24")],
)
def test_uneven_heads_are_refused_with_sizes_that_work(
    kv_heads: int, heads: int, size: int, sizes: str
) -> None:
    with pytest.raises(BudgetError) as caught:
        kv_heads_per_gpu(kv_heads, heads, size)
    assert f"use one of {sizes}" in str(caught.value)
    for good in sizes.split(", "):
        kv_heads_per_gpu(kv_heads, heads, int(good))


@settings(deadline=None)
@given(
    total=st.integers(1 * GIB, 200 * GIB),
    weights=st.integers(0, 80 * GIB),
    seqs=st.integers(1, 64),
    length=st.integers(1, 40_000),
    arena=st.one_of(st.just("auto"), st.integers(0, 60 * GIB)),
    headroom=st.sampled_from([0.0, 0.05, 0.1, 0.25]),
)
def test_what_is_granted_fits_and_holds_the_need(
    total: int, weights: int, seqs: int, length: int, arena: Any, headroom: float
) -> None:
    model = LLAMA_8B.model_copy(update={"weight_bytes": weights})
    wanted = request(
        model=model,
        gpu_total_bytes=total,
        target_seqs=seqs,
        max_model_len=length,
        gpu_arena=arena,
        headroom_fraction=headroom,
    )
    try:
        budget = compute_budget(wanted)
    except BudgetError:
        return
    assert budget.gpu_memory_utilization is not None
    # vLLM rounds its share up (v1/worker/utils.py).
    vllm = math.ceil(total * Fraction(str(budget.gpu_memory_utilization)))
    assert vllm + budget.gpu_arena_bytes + row(budget, "headroom") <= total + 1
    assert vllm - weights - wanted.engine_overhead_bytes >= row(budget, "KV need")
    assert budget.kv_pool_tokens >= seqs * length
    assert 0 <= budget.gpu_arena_bytes
    if arena != "auto":
        assert budget.gpu_arena_bytes == arena


@settings(deadline=None)
@given(seqs=st.integers(1, 50), total=st.integers(20 * GIB, 100 * GIB))
def test_a_spec_is_refused_only_when_it_cannot_fit(seqs: int, total: int) -> None:
    fits = total * Fraction("0.95") - (18 + seqs) * GIB
    try:
        compute_budget(request(gpu_total_bytes=total, target_seqs=seqs))
    except BudgetError:
        assert fits < Fraction(total, 10_000) + 1, "what rounding to four decimals takes"
    else:
        assert fits >= -1


def test_table_has_a_line_for_each_term() -> None:
    budget = compute_budget(request())
    lines = format_rows(budget.rows).splitlines()
    assert len(lines) == 1 + len(budget.rows)
    for line, term in zip(lines[1:], budget.rows, strict=True):
        assert term.term in line
        assert str(term.bytes) in line
        assert line.endswith(term.why)


def test_shape_comes_from_the_config_of_the_model() -> None:
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "dtype": "float32",
    }
    shape = model_shape(config, weight_bytes=7)
    assert shape == ModelShape(
        num_layers=30,
        num_attention_heads=9,
        num_kv_heads=3,
        head_dim=64,
        kv_dtype_bytes=4,
        weight_bytes=7,
    )
    nested = model_shape({"text_config": {**config, "head_dim": 128}}, num_parameters=10)
    assert (nested.head_dim, nested.weight_bytes) == (128, 40)
    assert model_shape({**config, "num_key_value_heads": None}, weight_bytes=7).num_kv_heads == 9
    with pytest.raises(BudgetError, match="field 'num_hidden_layers'"):
        model_shape({"num_attention_heads": 9, "hidden_size": 9}, weight_bytes=7)
    with pytest.raises(BudgetError, match="size of the weights"):
        model_shape(config)
