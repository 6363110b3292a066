"""The private folder of a server, and the server's command line."""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path

import pytest

from inferscale_runtime.cli import main
from inferscale_runtime.config import RuntimeConfig
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.server.cli import build_command, make_run_dir, register


def test_private_and_new(tmp_path: Path) -> None:
    first, second = make_run_dir(tmp_path), make_run_dir(tmp_path)
    assert first != second
    for folder in (first, second):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "lock").stat().st_mode & 0o777 == 0o600


def test_stale_folders_go_and_live_ones_stay(tmp_path: Path) -> None:
    stale = tmp_path / "inferscale-dead"
    stale.mkdir()
    (stale / "lock").touch()
    (stale / "slab").write_bytes(b"x")
    other = tmp_path / "something-else"
    other.mkdir()
    (other / "lock").touch()
    live = make_run_dir(tmp_path)
    assert not stale.exists()
    assert other.exists()
    make_run_dir(tmp_path)
    assert live.exists()


def test_the_lock_goes_with_the_process(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        make_run_dir(tmp_path)
        os._exit(0)
    os.waitpid(child, 0)
    (gone,) = tmp_path.glob("inferscale-*")
    kept = make_run_dir(tmp_path)
    assert list(tmp_path.glob("inferscale-*")) == [kept]
    assert not gone.exists()


def test_root_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--run-root"):
        make_run_dir(tmp_path / "nowhere")


def test_command() -> None:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    arguments = parser.parse_args(
        ["serve", "--model", "m", "--port", "9", "--", "--max-model-len", "64"]
    )
    command = build_command(arguments, RuntimeConfig(store="s", run_dir="r"), "m")
    assert command[-2:] == ["--max-model-len", "64"]
    assert "--" not in command
    assert command[command.index("--host") + 1] == "127.0.0.1"
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    own = transfer["kv_connector_extra_config"]["inferscale"]
    assert RuntimeConfig.model_validate(own) == RuntimeConfig(store="s", run_dir="r")


@pytest.mark.parametrize(
    ("extra", "folder", "name", "revision"),
    [
        ([], "/cache/x", "builtin:x", None),
        (["--served-model-name", "n"], "/cache/x", "n", None),
        (["--revision", "r1"], "builtin:x", None, "r1"),
    ],
)
def test_model_name_and_revision(
    extra: list[str], folder: str, name: str | None, revision: str | None
) -> None:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    arguments = parser.parse_args(["serve", "--model", "builtin:x", *extra])
    command = build_command(arguments, RuntimeConfig(store="s"), folder)
    assert command[command.index("--model") + 1] == folder
    for flag, value in (("--served-model-name", name), ("--revision", revision)):
        assert (command[command.index(flag) + 1] if flag in command else None) == value


def serve(*flags: str) -> int:
    return main(["serve", "--model", "m", *flags])


def test_addresses_that_cannot_be_used_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert serve("--store", str(tmp_path), "--port", port) == 2
        error = capsys.readouterr().err
        assert f"--port {port}" in error
        assert "in use" in error
    assert serve("--store", str(tmp_path), "--port", "70000") == 2
    assert "1..65535" in capsys.readouterr().err
    assert serve("--store", str(tmp_path), "--host", "no.such.host.invalid") == 2
    assert "no.such.host.invalid" in capsys.readouterr().err


def test_one_way_to_name_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"stores": [{"name": "a", "url": "/a"}]}))
    assert serve("--store", "/b", "--config", str(config)) == 2
    assert "leave one of them out" in capsys.readouterr().err
    config.write_text(json.dumps({"stores": [{"name": "A", "url": "/a"}]}))
    assert serve("--config", str(config)) == 2
    assert "stores.0.name" in capsys.readouterr().err
    assert serve() == 2
    assert "--store is missing" in capsys.readouterr().err


def test_a_single_store_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    assert serve("--store", str(tmp_path), "--port", port) == 2
    assert "is no store" in capsys.readouterr().err
