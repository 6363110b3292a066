"""Batches of concurrent questions, with an embedder that waits to be released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from inferscale_runtime.retrieval.batcher import EmbeddingBatcher


class GatedEmbedder:
    """Notes its batches; each call waits for one permit."""

    name, dim = "gated", 2

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.active = 0
        self.fail = False

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        self.active += 1
        assert self.active == 1, "two calls at once"
        self.batches.append(list(texts))
        self.entered.release()
        assert self.permits.acquire(timeout=30)
        self.active -= 1
        if self.fail:
            raise RuntimeError("broken")
        return np.array([[len(text), 1] for text in texts], np.float32)


async def ask(batcher: EmbeddingBatcher, texts: Sequence[str]) -> list[asyncio.Task[object]]:
    tasks = [asyncio.ensure_future(batcher.embed(text)) for text in texts]
    await asyncio.sleep(0)  # lets each task put its text in the queue
    return tasks


def test_what_arrives_meanwhile_is_one_batch() -> None:
    async def run() -> None:
        embedder = GatedEmbedder()
        batcher = EmbeddingBatcher(embedder, max_batch=3)
        tasks = await ask(batcher, ["a"])
        await asyncio.to_thread(embedder.entered.acquire)
        tasks += await ask(batcher, ["bb", "ccc", "bb", "dddd"])
        for _ in range(3):
            embedder.permits.release()
        vectors = await asyncio.gather(*tasks)
        assert embedder.batches == [["a"], ["bb", "ccc"], ["dddd"]]
        assert [int(vector[0]) for vector in vectors] == [1, 2, 3, 2, 4]

    asyncio.run(run())


def test_a_request_that_left_is_not_embedded() -> None:
    async def run() -> None:
        embedder = GatedEmbedder()
        batcher = EmbeddingBatcher(embedder)
        tasks = await ask(batcher, ["a"])
        await asyncio.to_thread(embedder.entered.acquire)
        tasks += await ask(batcher, ["gone", "stays"])
        tasks[0].cancel()  # its batch is at work
        tasks[1].cancel()
        await asyncio.sleep(0)
        embedder.permits.release()
        embedder.permits.release()
        assert int((await tasks[2])[0]) == 5
        assert embedder.batches == [["a"], ["stays"]]

    asyncio.run(run())


def test_a_failure_reaches_its_batch_only() -> None:
    async def run() -> None:
        embedder = GatedEmbedder()
        batcher = EmbeddingBatcher(embedder)
        embedder.fail = True
        embedder.permits.release()
        with pytest.raises(RuntimeError, match="broken"):
            await batcher.embed("a")
        embedder.fail = False
        embedder.permits.release()
        assert int((await batcher.embed("bb"))[0]) == 2

    asyncio.run(run())
