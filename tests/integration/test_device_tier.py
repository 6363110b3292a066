"""The GPU arena in a real engine; without a GPU the same code keeps its copies on the CPU."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.checkpoints import make_checkpoint
from tests.integration.engine import (
    assert_same,
    encode,
    encoder,
    max_difference,
    random_ids,
    random_pieces,
    serve,
)

from inferscale_runtime.tiers.device_arena import DeviceFigures
from inferscale_runtime.tiers.device_tier import read_device_figures
from inferscale_runtime.tiers.slab import load_shape, map_slab

pytestmark = pytest.mark.vllm
TIMEOUT = 30.0


def figures_when(run_dir: Path, reached: Callable[[DeviceFigures], bool]) -> DeviceFigures:
    """What the worker wrote, once it tells of what is waited for."""
    end = time.monotonic() + TIMEOUT
    while True:
        found = read_device_figures(run_dir)
        if found is not None and reached(found):
            return found
        assert time.monotonic() < end, f"still {found}"
        time.sleep(0.05)


def test_copies_on_the_device_give_what_text_gives(checkpoints: Path, tmp_path: Path) -> None:
    model = make_checkpoint("llama3", checkpoints)
    with encoder(model) as engine:
        memory = encode(engine, random_pieces(3))
    ids = (*memory.token_ids, *random_ids(random.Random(4), 19))
    plan = tmp_path / "plan.json"
    with serve(model, tmp_path, gpu_bytes=64 << 20, plan_file=str(plan)) as served:
        keys = served.put("a", memory)
        expected = served.text(ids)
        assert_same(served.inject(keys, ids), expected)
        first = figures_when(tmp_path, lambda now: now.misses > 0)
        assert first.misses >= len(keys)
        assert (first.hits, first.evictions) == (0, 0)
        assert 0 < first.used_bytes <= first.budget_bytes == first.allocated_bytes

        assert_same(served.inject(keys, ids), expected)
        second = figures_when(tmp_path, lambda now: now.hits > 0)
        assert (second.hits, second.misses) == (first.misses, first.misses)

        # What the engine has in its own prefix cache is not fetched again.
        again = [served.inject(keys, ids, salt="again") for _ in range(2)]
        assert again[1].cached > again[0].cached
        for result in again:
            assert_same(result, expected)

        # The control: with other bytes in DRAM the answer stays, so the copies are read...
        shape = load_shape(tmp_path)
        assert shape is not None
        map_slab(tmp_path, shape).zero_()
        assert_same(served.inject(keys, ids), expected)
        # ... until the plan takes their memory.
        plan.write_text(json.dumps({"gpu_bytes": 0}))
        figures_when(tmp_path, lambda now: now.budget_bytes == now.used_bytes == 0)
        assert max_difference(served.inject(keys, ids), expected) > 1e-2
