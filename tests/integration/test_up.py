"""``inferscale up`` with the real encoder and server: examples/quickstart.yaml on the CPU."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.commands import command
from tests.integration.up_command import Command, is_alive

# Minutes of model building and server starts; the shorter tests of `up` have stand-ins for both.
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
PATIENCE = 1500.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("up")
    (folder / "f.yaml").write_text(QUICKSTART.read_text())
    running = Command(command("up"), folder, "--follow-logs", patience=PATIENCE)
    yield running
    running.process.kill()
    running.process.wait()


def test_the_printed_line_gets_an_injected_answer(up: Command) -> None:
    answer = json.loads(subprocess.check_output(["bash", "-c", up.curl()]))
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["memory"]["mode"] == "injected"
    assert answer["usage"]["memory"]["facts"] > 0
    assert "MemoryStore/maya-memory  Encoded=True" in up.text
    assert "PersonalizedModel/maya-chat  Ready=True" in up.text


def test_another_top_k_is_a_rolling_restart_without_downtime(up: Command) -> None:
    line = up.curl()
    done = threading.Event()
    answers: list[int] = []
    failures: list[str] = []

    def ask() -> None:
        while not done.is_set():
            result = subprocess.run(
                ["bash", "-c", line], capture_output=True, text=True, check=False
            )
            try:
                answers.append(json.loads(result.stdout)["usage"]["memory"]["facts"])
            except (ValueError, KeyError):
                failures.append(f"{result.returncode}: {result.stdout}{result.stderr}")
            done.wait(0.5)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        up.until(lambda: answers)
        assert answers[-1] != 3
        content = up.file.read_text()
        up.file.write_text(
            content.replace("  memoryStores:\n", "  retrieval:\n    topK: 3\n  memoryStores:\n", 1)
        )
        up.until(lambda: 3 in answers)
        first = answers.index(3)
        up.until(lambda: len(answers) > first + 5 or failures)
    finally:
        done.set()
        asking.join(PATIENCE)
    assert failures == []


def test_ctrl_c_leaves_no_process(up: Command) -> None:
    pids = up.pids()
    assert len(pids) >= 3, "supervisor, server, engine"
    assert up.end() == 0, up.text
    assert not [pid for pid in pids if is_alive(pid)]
    assert "stopped" in up.lines[-1]
