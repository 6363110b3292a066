"""Exact inner-product search over one user's embeddings.

A user has thousands of facts, not millions: one matrix product is exact and takes well under a
millisecond, so no index is kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_Matrix = npt.NDArray[np.float32]


def top_k(query: _Matrix, embeddings: _Matrix, k: int, min_score: float | None = None) -> list[int]:
    """Finds the rows most similar to a query.

    Args:
        query: ``[dim]``.
        embeddings: ``[n, dim]``.
        k: At most this many rows; may exceed n.
        min_score: Leave out rows whose inner product is below this.

    Returns:
        Row numbers, best first; among equal scores the lower row comes first.
    """
    return top_k_batch(query[None, :], embeddings, k, min_score)[0]


def top_k_batch(
    queries: _Matrix, embeddings: _Matrix, k: int, min_score: float | None = None
) -> list[list[int]]:
    """Finds the rows most similar to each of several queries over the same embeddings.

    Args:
        queries: ``[q, dim]``.
        embeddings: ``[n, dim]``.
        k: At most this many rows for each query; may exceed n.
        min_score: Leave out rows whose inner product is below this.

    Returns:
        For each query what `top_k` returns.
    """
    if k <= 0 or not len(embeddings):
        return [[] for _ in queries]
    # No BLAS: it sums in an order that varies with row number and batch size: equal rows could get
    # unequal scores, and which requests happened to arrive together could decide a near tie.
    return [_best(np.einsum("nd,d->n", embeddings, query), k, min_score) for query in queries]


def _best(scores: _Matrix, k: int, min_score: float | None) -> list[int]:
    if k < len(scores):
        # Whatever reaches the k-th best score, ties included; the sort then picks among them.
        threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
        rows = np.flatnonzero(scores >= threshold)
    else:
        rows = np.arange(len(scores))
    rows = rows[np.argsort(-scores[rows], kind="stable")][:k]
    if min_score is not None:
        rows = rows[scores[rows] >= min_score]
    return [int(row) for row in rows]
