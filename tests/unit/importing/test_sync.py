"""A folder that follows a tool: what changes, what is gone, and what an interruption leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.importing.tool_servers import TOKEN, Mem0Server, ZepServer, status

from inferscale_runtime import cli
from inferscale_runtime.encode.input import UserInput, read_inputs
from inferscale_runtime.importing import client


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in ("MEM0", "ZEP"):
        monkeypatch.setenv(f"{tool}_API_KEY", TOKEN)
    monkeypatch.setattr(client.time, "sleep", lambda seconds: None)


@pytest.fixture
def zep() -> Iterator[ZepServer]:
    with ZepServer() as server:
        for user in ("ann", "ben", "cleo"):
            server.users.append({"uuid": f"id-{user}", "user_id": user})
            server.edges[f"id-{user}"] = [edge(1, user), edge(2, user)]
        yield server


def edge(number: int, user: str, **fields: Any) -> dict[str, Any]:
    return {
        "uuid": f"{user}{number}",
        "fact": f"{user} fact {number}",
        "created_at": f"2026-01-{number:02}T00:00:00Z",
        **fields,
    }


def run(server: Any, folder: Path, *flags: str, tool: str = "zep") -> tuple[int, dict[str, Any]]:
    report = folder.parent / "report.json"
    report.unlink(missing_ok=True)
    arguments = ["import", tool, server.url, "--out", str(folder), "--json", str(report), *flags]
    code = cli.main(arguments)
    return code, json.loads(report.read_text()) if report.exists() else {}


def users(folder: Path) -> dict[str, UserInput]:
    return read_inputs([str(folder)], max_bytes=1 << 20)


def ids(folder: Path) -> dict[str, list[str]]:
    return {user: [fact.id for fact in given.facts] for user, given in users(folder).items()}


def facts(report: dict[str, Any]) -> tuple[int, int, int, int]:
    return tuple(report["facts"][name] for name in ("created", "updated", "deleted", "unchanged"))  # type: ignore[return-value]


def test_creations_changes_and_deletions_follow(zep: ZepServer, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code, report = run(zep, folder)
    assert (code, facts(report)) == (0, (6, 0, 0, 0))
    assert ids(folder) == {user: [f"{user}1", f"{user}2"] for user in ("ann", "ben", "cleo")}
    assert users(folder)["ann"].origins == {"zep"}

    untouched = {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    assert facts(run(zep, folder)[1]) == (0, 0, 0, 6)
    assert untouched == {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}

    zep.edges["id-ann"][0]["expired_at"] = "2026-02-01T00:00:00Z"
    zep.edges["id-ann"].append(edge(3, "ann"))
    zep.edges["id-ben"][1]["fact"] = "corrected"
    zep.users.pop()
    code, report = run(zep, folder)
    assert (code, facts(report), report["gone"]) == (0, (1, 1, 3, 2), 1)
    # Cleo is still named, so that the encoder deletes what came from Zep.
    assert ids(folder) == {"ann": ["ann2", "ann3"], "ben": ["ben1", "ben2"], "cleo": []}
    assert users(folder)["cleo"].origins == {"zep"}
    assert facts(run(zep, folder)[1]) == (0, 0, 0, 4)

    zep.users.append({"uuid": "id-cleo", "user_id": "cleo"})
    assert facts(run(zep, folder)[1]) == (2, 0, 0, 4)


def test_a_dry_run_counts_by_user_and_writes_nothing(
    zep: ZepServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    code, report = run(zep, folder, "--dry-run")
    assert (code, facts(report)) == (0, (6, 0, 0, 0))
    assert capsys.readouterr().out.splitlines()[:3] == [
        "ann\t+2 ~0 -0", "ben\t+2 ~0 -0", "cleo\t+2 ~0 -0",
    ]  # fmt: skip
    assert not folder.exists()
    run(zep, folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    zep.users.pop()
    assert facts(run(zep, folder, "--dry-run")[1]) == (0, 0, 2, 4)
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


def test_an_interrupted_import_goes_on_where_it_was(
    zep: ZepServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"

    async def list_users(request: Any) -> Any:
        zep.misbehave += [ann, *[status(500)] * 100]
        return await zep.routes()[0].handler(request)

    async def ann(request: Any) -> Any:
        return await zep.routes()[1].handler(request)

    zep.page = 10
    zep.misbehave.append(list_users)
    code, _ = run(zep, folder)
    assert code == 1
    assert "run the same command again" in capsys.readouterr().err
    assert ids(folder) == {"ann": ["ann1", "ann2"]}
    zep.misbehave.clear()
    zep.requests.clear()
    code, report = run(zep, folder)
    assert (code, report["resumed"], report["read"]) == (0, 1, 2)
    assert not any("id-ann" in request for request in zep.requests)
    assert len(ids(folder)) == 3
    assert run(zep, folder)[1]["resumed"] == 0


def test_an_empty_list_of_users_deletes_nobody_unless_told(
    zep: ZepServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    run(zep, folder)
    zep.users.clear()
    assert run(zep, folder)[0] == 1
    assert "--allow-empty" in capsys.readouterr().err
    assert all(ids(folder).values())
    assert facts(run(zep, folder, "--allow-empty")[1]) == (0, 0, 6, 0)
    assert not any(ids(folder).values())


def test_a_folder_belongs_to_one_source(
    zep: ZepServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    run(zep, folder)
    assert run(zep, folder, "--option", "turns=true")[0] == 2
    assert f"it follows zep at {zep.url}, not zep at {zep.url} turns=true" in (
        capsys.readouterr().err
    )
    other = tmp_path / "other"
    other.mkdir()
    (other / "facts.jsonl").write_text("")
    assert run(zep, other)[0] == 2
    assert "that no import made" in capsys.readouterr().err
    (folder / ".inferscale-import.json").write_text("{")
    assert run(zep, folder)[0] == 2
    assert "delete the folder" in capsys.readouterr().err


def test_a_lost_or_damaged_file_is_read_again(zep: ZepServer, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run(zep, folder)
    first, second, _ = sorted(folder.glob("*.jsonl"))
    first.unlink()
    second.write_text('{"kind": "fact"')
    assert run(zep, folder)[0] == 0
    assert ids(folder) == {user: [f"{user}1", f"{user}2"] for user in ("ann", "ben", "cleo")}


def test_a_user_whose_marker_is_the_same_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with Mem0Server() as mem0:
        for number, user in enumerate(("ann", "ann", "ben"), start=1):
            time = f"2026-01-{number:02}T00:00:00+00:00"
            mem0.memories.append(
                {"id": f"m{number}", "memory": "x", "user_id": user, "created_at": time}
            )
        assert facts(run(mem0, folder, tool="mem0")[1])[0] == 3
        del mem0.memories[0]
        mem0.requests.clear()
        report = run(mem0, folder, tool="mem0")[1]
        assert (report["unchanged"], facts(report)) == (1, (0, 0, 1, 1))
        assert [request for request in mem0.requests if "user_id=ben" in request] == []


def test_lines_on_stdout(zep: ZepServer, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", "zep", zep.url, "--out", "-"]) == 0
    out = capfd.readouterr().out
    kinds = [json.loads(line)["kind"] for line in out.splitlines()]
    assert kinds == ["user", "fact", "fact"] * 3


def test_no_secret_and_no_fact_in_what_is_said(
    zep: ZepServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text(TOKEN)
    folder = tmp_path / "out"
    for broken in ([], [status(401)], [status(500)] * 100):
        zep.misbehave = list(broken)
        run(zep, folder, "--token-file", str(key))
    said = "".join(capfd.readouterr())
    assert f"--token-file '{key}' is not accepted" in said
    for secret in (TOKEN, "fact 1", "private words"):
        assert secret not in said
    state = (folder / ".inferscale-import.json").read_text()
    assert TOKEN not in state
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob("*.jsonl"))


def test_locomo_is_an_import_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "locomo.json"
    data.write_text("[]")
    assert cli.main(["import", "locomo", str(data)]) == 0
    assert cli.main(["locomo", str(data)]) == 0
    assert capsys.readouterr().out == ""
