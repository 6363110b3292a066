"""The ``inferscale`` command as a user's shell runs it, and the sample's facts as input lines."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from inferscale_runtime.children import command
from inferscale_runtime.demo.run import SAMPLE

__all__ = ["ENVIRONMENT", "command", "run_cli", "sample_facts"]

# In-process engines need one process; the command must run in vLLM's ordinary process split.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}


def run_cli(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), capture_output=True, text=True, check=False, env=ENVIRONMENT
    )


def sample_facts(count: int) -> list[dict[str, Any]]:
    """The sample's first facts without their source turns."""
    lines = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    facts = [line for line in lines if line["kind"] == "fact"][:count]
    return [{k: v for k, v in fact.items() if k != "turn"} for fact in facts]
