from __future__ import annotations

from pathlib import Path

import torch

from inferscale_runtime.bench.quality.cache import Results, TextCache


def test_a_prompt_is_computed_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> torch.Tensor:
        calls.append(1)
        return torch.full((2, 3), float(len(calls)))

    first = TextCache(tmp_path, "model-a").get([1, 2, 3], 2, compute)
    assert torch.equal(TextCache(tmp_path, "model-a").get([1, 2, 3], 2, compute), first)
    assert len(calls) == 1
    for identity, ids, positions in (
        ("model-b", [1, 2, 3], 2),
        ("model-a", [1, 2, 4], 2),
        ("model-a", [1, 2, 3], 1),
    ):
        before = len(calls)
        TextCache(tmp_path, identity).get(ids, positions, compute)
        assert len(calls) == before + 1
    assert not [file for file in tmp_path.iterdir() if file.suffix != ".npy"]


def test_results_survive_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert Results(file).get("a") is None
    Results(file).put("a", {"kl": 0.5, "answer": "naïve"})
    with file.open("a") as stream:
        stream.write('\n{"key": "b", "values": {"kl": 0.')
    results = Results(file)
    assert results.get("a") == {"kl": 0.5, "answer": "naïve"}
    assert results.get("b") is None
    results.put("c", {"kl": 1.0})
    assert Results(file).get("c") == results.get("c") == {"kl": 1.0}
