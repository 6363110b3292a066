"""Arguments of ``inferscale encode``: what is refused before anything heavy is imported."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferscale_runtime import cli as command
from inferscale_runtime.encode import cli
from inferscale_runtime.encode.cli import encode_config
from inferscale_runtime.errors import ConfigError, SourceError, StoreUnwritableError


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.register(parser.add_subparsers())
    return parser.parse_args(["encode", "--input", "x.jsonl", "--model", "m", *flags])


def config_file(tmp_path: Path, **fields: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


def test_the_one_store_of_a_rendered_config(tmp_path: Path) -> None:
    path = config_file(
        tmp_path,
        stores=[{"name": "a", "url": "s3://x/a"}],
        encoding={"policy": "none", "max_input_bytes": 5},
        quota={"max_facts_per_user": 3},
    )
    config = encode_config(parse("--config", path))
    assert (config.store, config.stores) == ("s3://x/a", ())
    assert (config.encoding.policy, config.encoding.max_input_bytes) == ("none", 5)
    assert config.quota.max_facts_per_user == 3


def test_flags_stand_above_the_config(tmp_path: Path) -> None:
    stores = [{"name": "a", "url": "/a"}, {"name": "b", "url": "/b"}]
    path = config_file(tmp_path, stores=stores, encoding={"policy": "none"})
    flags = ["--policy", "all", "--embedder", "/e", "--embedder-api-key-file", "/k"]
    config = encode_config(parse("--config", path, "--store", "/c", *flags))
    assert config.store == "/c"
    assert (config.encoding.policy, config.encoding.embedder) == ("all", "/e")
    assert config.retrieval.embedder_api_key_file == "/k"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "--store is missing"),
        ({"stores": [{"name": "a", "url": "/a"}, {"name": "b", "url": "/b"}]}, "2 (a, b)"),
        ({"stores": [{"name": "a", "url": "/a", "colour": 1}]}, "stores.0.colour"),
    ],
)
def test_stores_that_cannot_be_written(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        encode_config(parse("--config", config_file(tmp_path, **fields)))
    assert words in str(caught.value)


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path / "bytes", "not UTF-8")):
        with pytest.raises(ConfigError, match=reason):
            encode_config(parse("--config", str(path)))


def run(tmp_path: Path, *flags: str) -> int:
    source = tmp_path / "x.jsonl"
    source.touch()
    fixed = ["--input", str(source), "--model", "m", "--store", str(tmp_path / "store")]
    return command.main(["encode", *fixed, *flags])


def test_a_report_that_cannot_be_written_is_found_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--json", str(tmp_path / "none" / "report.json")) == 2
    assert "--json" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_the_status_port_is_tried_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert run(tmp_path, "--status-port", port, "--status-host", "127.0.0.1") == 2
    assert f"--status-port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong flag"), 2),
        (SourceError("x: HTTP 503"), 1),
        (StoreUnwritableError("no space"), 1),
        (RuntimeError("the engine\nbroke"), 1),
    ],
)
def test_exit_codes_and_the_last_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: int,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_encode", fail)
    assert run(tmp_path) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("inferscale: error: ")
    assert str(error).splitlines()[0] in last


def test_nothing_heavy_is_imported_before_the_job(tmp_path: Path) -> None:
    """So that the status port answers, and wrong arguments are told, within a second."""
    script = (
        "import sys, inferscale_runtime.encode.cli\n"
        "print([m for m in ('torch', 'vllm', 'transformers', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
