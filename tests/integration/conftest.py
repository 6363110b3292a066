"""Settings of the real-engine tests; they must stand before vLLM is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if _WORKER:
    # Each process of a parallel run has a core of its own; vLLM would bind all engines to one.
    _cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(_cores[int(_WORKER[2:]) % len(_cores)])

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, shared with the demo."""
    from inferscale_runtime.demo.model import build_smollm2

    return build_smollm2(Path(ROOT) / "build" / "demo" / "model")


@pytest.fixture
def unused_port() -> int:
    """A port that nobody listens on."""
    from tests.integration.ports import free_port

    return free_port()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")
