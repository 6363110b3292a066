from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inferscale_runtime.retrieval.search import top_k, top_k_batch

EMBEDDINGS = np.array([[0, 1], [1, 0], [0.6, 0.8], [1, 0]], np.float32)
QUERY = np.array([1, 0], np.float32)


def test_best_first_and_lower_index_wins_ties() -> None:
    assert top_k(QUERY, EMBEDDINGS, 1) == [1]
    assert top_k(QUERY, EMBEDDINGS, 3) == [1, 3, 2]
    assert top_k(QUERY, EMBEDDINGS, 99) == [1, 3, 2, 0]


def test_min_score_is_inclusive() -> None:
    assert top_k(QUERY, EMBEDDINGS, 4, min_score=1.0) == [1, 3]
    assert top_k(QUERY, EMBEDDINGS, 4, min_score=1.1) == []


def test_nothing_to_find() -> None:
    assert top_k(QUERY, EMBEDDINGS, 0) == []
    assert top_k(QUERY, np.zeros((0, 2), np.float32), 3) == []
    assert top_k_batch(np.zeros((0, 2), np.float32), EMBEDDINGS, 3) == []


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 45))
def test_equals_a_full_stable_sort_alone_and_in_a_batch(seed: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    # Whole numbers make many exact ties.
    embeddings = rng.integers(-2, 3, (n, 3)).astype(np.float32)
    queries = rng.integers(-2, 3, (4, 3)).astype(np.float32)
    expected = [sorted(range(n), key=lambda i: (-float(embeddings[i] @ q), i))[:k] for q in queries]
    assert top_k_batch(queries, embeddings, k) == expected
    assert [top_k(q, embeddings, k) for q in queries] == expected


def test_equal_rows_score_equally_wherever_they_stand() -> None:
    rng = np.random.default_rng(0)
    row, query = rng.normal(size=(2, 383)).astype(np.float32)
    assert top_k(query, np.tile(row, (77, 1)), 77) == list(range(77))
