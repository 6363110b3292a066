from __future__ import annotations

import argparse
import json

import pytest

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.store import cli


def run(*words):
    parser = argparse.ArgumentParser()
    cli.register(parser.add_subparsers())
    args = parser.parse_args(["store", *words])
    return args.func(args)


def test_ls_and_show(store, kit, capsys):
    kit.filled(store)
    assert run("ls", store.url) == 0
    assert "ana\tversion 1\tfacts 4" in capsys.readouterr().out
    assert run("ls", store.url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["users"][0]["segments"] == {kit.FP: 4}
    for options in ([], ["--json"]):
        assert run("show", store.url, "ana", *options) == 0
        out = capsys.readouterr().out
        assert kit.FP in out
        assert "fact no" not in out
        assert run("show", store.url, "ana", "--facts", *options) == 0
        assert "fact no 3" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no user 'bob'"):
        run("show", store.url, "bob")


def test_verify_names_each_damaged_file(store, kit, capsys, folder_of):
    kit.filled(store)
    kit.filled(store, "bob")
    assert run("verify", store.url) == 0
    names = []
    for path in folder_of("ana").glob("*-*"):
        kit.flip(path, path.stat().st_size // 2)
        names.append(path.name)
    capsys.readouterr()
    assert run("verify", store.url) == 1
    out = capsys.readouterr().out
    assert all(name in out for name in names)
    assert run("verify", store.url, "--user", "bob") == 0
    assert run("verify", store.url, "--user", "ana") == 1
    with pytest.raises(ConfigError):
        run("verify", store.url, "--user", "carl")


def test_rm_user(store, kit, capsys):
    kit.filled(store)
    with pytest.raises(ConfigError, match="--yes"):
        run("rm-user", store.url, "ana")
    assert store.read_user("ana")
    assert run("rm-user", store.url, "ana", "--yes") == 0
    assert "erased 5 files" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no user"):
        run("rm-user", store.url, "ana", "--yes")
