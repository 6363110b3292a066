"""``inferscale up`` as a user runs it, with small programs in place of encoder and server.

Everything else is real: files, planners, builders, controllers, processes, ports. The real encoder
and server are in tests/integration/test_up.py.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.up_command import Command, is_alive

TIMEOUT = 120.0

# Stands for `inferscale encode` and `inferscale serve`: same arguments, report and routes.
STAND_IN = """
import http.server, json, os, signal, sys
words = sys.argv[2:]
def option(name):
    return words[words.index(name) + 1]
config = json.loads(open(option("--config")).read())
if sys.argv[1] == "encode":
    facts = [line for line in open(option("--input") + "/facts.jsonl") if line.strip()]
    os.makedirs(option("--store"), exist_ok=True)
    open(option("--store") + "/facts", "w").writelines(facts)
    report = {"users": 1, "facts": len(facts), "encoded": len(facts), "store_bytes": 10,
              "fingerprint": "a" * 64}
    open(option("--json"), "w").write(json.dumps(report))
    sys.exit(0)
store = config["stores"][0]["url"]
facts = len(open(store + "/facts").readlines())
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"k": config["retrieval"]["top_k"], "facts": facts, "pid": os.getpid()})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        auth, key = config.get("auth"), self.headers.get("authorization")
        own = open(auth["keys_file"]).read() if auth else None
        self.answer({"memory": body["memory"], "model": body["model"], "key": key, "own": own})
    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_):
        pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("serving", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
"""

# The same command, except for what runs in a container.
UP = """
import pathlib, sys
from inferscale_operator.local import launch
real = launch.program
def program(words):
    if words[:1] == ["inferscale"]:
        return [sys.executable, "-S", sys.argv[1], *words[1:]]
    return real(words)
launch.program = program
from inferscale_runtime.cli import main
sys.exit(main(["up", *sys.argv[2:]]))
"""


def documents(top_k: int = 5, facts: int = 2, **model: Any) -> str:
    lines = [json.dumps({"kind": "fact", "user": "maya", "text": str(i)}) for i in range(facts)]
    api = "inferscale.dev/v1alpha1"
    shape = {"id": "builtin:smollm2-135m"}
    return yaml.safe_dump_all(
        [
            {
                "apiVersion": api,
                "kind": "MemoryStore",
                "metadata": {"name": "facts"},
                "spec": {
                    "model": shape,
                    "source": {"configMap": {"name": "source"}},
                    "storage": {"pvc": {"size": "1Gi"}},
                },
            },
            {
                "apiVersion": api,
                "kind": "PersonalizedModel",
                "metadata": {"name": "chat"},
                "spec": {
                    "model": shape,
                    "memoryStores": [{"name": "facts"}],
                    "retrieval": {"topK": top_k},
                    **model,
                },
            },
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "source"},
                "data": {"facts.jsonl": "\n".join(lines)},
            },
        ]
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    running: list[Command] = []

    def start(content: str | None = None, *options: str) -> Command:
        if content is not None:
            (tmp_path / "f.yaml").write_text(content)
        script = tmp_path / "stand_in.py"
        script.write_text(STAND_IN)
        program = [sys.executable, "-c", UP, str(script)]
        running.append(Command(program, tmp_path, *options, patience=TIMEOUT))
        return running[-1]

    yield start
    for command in running:
        command.process.kill()
        command.process.wait()


Start = Callable[..., Command]


def test_from_a_file_to_an_answer_and_a_clean_end(start: Start, tmp_path: Path) -> None:
    up = start(documents(), "--follow-logs")
    line = up.curl()
    answer = json.loads(subprocess.check_output(["bash", "-c", line]))
    assert answer["memory"] == {"user": "maya"}
    assert answer["model"] == "chat"
    assert "MemoryStore/facts  Encoded=True" in up.text
    assert "PersonalizedModel/chat  Ready=True" in up.text
    assert any(re.fullmatch(r"chat-\S+ \| serving", line) for line in up.lines)
    pids = up.pids()
    assert len(pids) >= 2
    assert up.end() == 0, up.text
    assert not any(is_alive(pid) for pid in pids)


def test_a_changed_file_is_a_rolling_restart_without_a_failed_request(start: Start) -> None:
    up = start(documents(top_k=5))
    assert up.get()["k"] == 5
    failures: list[str] = []
    seen: set[int] = set()
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                seen.add(up.get()["k"])
            except (OSError, ValueError) as error:
                failures.append(repr(error))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        up.file.write_text(documents(top_k=6))
        up.until(lambda: 6 in seen)
        pid = up.get()["pid"]
        up.until(lambda: up.get()["pid"] == pid)
    finally:
        done.set()
        asking.join(TIMEOUT)
    assert failures == []
    assert seen == {5, 6}


def test_facts_that_are_added_are_encoded(start: Start) -> None:
    up = start(documents(facts=2))
    assert up.get()["facts"] == 2
    up.file.write_text(documents(facts=3))
    facts = up.data / "volumes/default/facts-store/facts"
    up.until(lambda: len(facts.read_text().splitlines()) == 3)


def test_a_change_that_is_wrong_is_told_and_changes_nothing(start: Start) -> None:
    up = start(documents())
    pid = up.get()["pid"]
    up.file.write_text(documents(top_k=-1))
    up.until(lambda: "spec.retrieval.topK -1" in up.text)
    assert up.get()["pid"] == pid


def test_the_next_run_goes_on_where_it_was(start: Start) -> None:
    first = start(documents())
    first.curl()
    assert first.end(signal.SIGTERM) == 0
    job_logs = {path.name for path in first.data.glob("logs/default/facts-encode-*")}
    second = start()
    assert second.get()["facts"] == 2
    assert {path.name for path in first.data.glob("logs/default/facts-encode-*")} == job_logs, (
        "what is encoded is not encoded again"
    )


def test_a_run_that_was_killed_leaves_no_process_and_can_go_on(start: Start) -> None:
    first = start(documents())
    first.curl()
    pids = first.pids()
    first.process.kill()
    first.process.wait()
    end = time.monotonic() + TIMEOUT
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert start().get()["facts"] == 2


def test_a_second_run_on_the_same_data_is_refused(start: Start) -> None:
    first = start(documents())
    first.curl()
    second = start()
    assert second.wait() == 2
    assert f"process {first.process.pid} runs here" in second.text
    assert first.get()["facts"] == 2


def test_down_ends_the_running_one_and_removes_data_on_demand(start: Start) -> None:
    up = start(documents())
    up.curl()
    down = [sys.executable, "-m", "inferscale_runtime.cli", "up", "--down"]
    down += ["--data-dir", str(up.data)]
    said = subprocess.check_output(down, text=True)
    assert said == f"process {up.process.pid} has ended\n"
    assert up.wait() == 0
    assert (up.data / "volumes").is_dir()
    said = subprocess.check_output([*down, "--volumes"], text=True)
    assert "nothing runs" in said
    assert not up.data.exists()


def test_an_api_key_is_made_and_printed_nowhere(start: Start) -> None:
    up = start(documents(auth={"mode": "apiKey"}), "--follow-logs")
    line = up.curl()
    answer = json.loads(subprocess.check_output(["bash", "-c", line]))
    assert answer["key"] == f"Bearer {answer['own']}"
    assert len(answer["own"]) >= 32
    up.end()
    assert answer["own"] not in up.text
    file = up.data / "keys/default/chat"
    assert file.stat().st_mode & 0o777 == 0o600
    assert shlex.quote(str(file)) in line


def test_a_removed_object_stays_unless_it_is_to_be_pruned(start: Start) -> None:
    content = documents()
    up = start(content)
    up.curl()
    only_stores = "---\n".join(
        part for part in content.split("---\n") if "PersonalizedModel" not in part
    )
    up.file.write_text(only_stores)
    up.until(lambda: "PersonalizedModel/chat is in no file any more" in up.text)
    assert up.get()["facts"] == 2
    up.end()
    pruned = start(None, "--prune")
    pruned.until(lambda: "PersonalizedModel/chat  deleted" in pruned.text)
    pruned.until(lambda: not pruned.pids())


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("kind: Pod\napiVersion: v1", [], "kind 'Pod'"),
        (documents(top_k=-1), [], "PersonalizedModel/chat): spec.retrieval.topK -1"),
        (documents(), ["--volume", "c=/none"], "--volume c=/none"),
        (documents(), ["--port", "x"], "'x' is no port"),
        (documents(), ["--volumes"], "--volumes is for --down"),
        (
            documents(model={"id": "builtin:smollm2-135m", "cache": {"claimName": "mine"}}),
            [],
            "spec.model.cache.claimName 'mine'",
        ),
    ],
)
def test_bad_input_ends_with_2(
    start: Start, content: str, options: list[str], message: str
) -> None:
    up = start(content, *options)
    assert up.wait() == 2
    assert message in up.text
    assert not up.data.exists()
