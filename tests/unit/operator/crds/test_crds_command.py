"""``inferscale-operator crds``: what is printed, when a definition is written, what ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from inferscale_operator import crds_command, main
from inferscale_operator.cluster.errors import ClusterError, InvalidError, UnavailableError
from inferscale_operator.cluster.transport import NotFoundError

ROOT = Path(__file__).parents[4]
SERVED = {"status": {"conditions": [{"type": "Established", "status": "True"}]}}


class FakeTransport:
    """Answers in turn; an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    async def request(self, method: str, path: str, **_: Any) -> Any:
        self.asked.append((method, path))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(crds_command, "POLL_SECONDS", 0.0)

    def run(*answers: Any, seconds: float = 60.0, version: str = "1.2.3") -> Any:
        transport = FakeTransport(*answers)
        crd = crds_command.definitions(version)[0]
        deadline = time.monotonic() + seconds
        work = crds_command.apply_definition(transport, crd, deadline, version)  # type: ignore[arg-type]
        done = asyncio.run(work)
        return done, [method for method, _ in transport.asked]

    return run


def written_by(version: str) -> dict[str, Any]:
    return {"metadata": {"annotations": {"inferscale.dev/crd-version": version}}, **SERVED}


def test_print_is_what_the_repository_holds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["inferscale-operator", "crds", "print"])
    assert main.main() == 0
    text = capsys.readouterr().out
    assert "&id" not in text
    printed = list(yaml.safe_load_all(text))
    for crd in printed:
        assert crd["metadata"].pop("annotations") == {
            "inferscale.dev/crd-version": crds_command.VERSION
        }
    files = sorted((ROOT / "crds").glob("*.yaml"))
    assert printed == [yaml.safe_load(file.read_text()) for file in files]


def test_missing_definition_is_created_and_waited_for(apply: Callable[..., Any]) -> None:
    done, asked = apply(NotFoundError("no"), {}, {}, SERVED)
    assert (done, asked) == ("created", ["GET", "PATCH", "GET", "GET"])


@pytest.mark.parametrize("version", ["1.2.3", "1.2.3-rc.1", "1.2.2", "0.9.9", "garbage"])
def test_definition_of_an_older_release_is_replaced(
    apply: Callable[..., Any], version: str
) -> None:
    assert apply(written_by(version), SERVED) == ("up to date", ["GET", "PATCH"])


@pytest.mark.parametrize("version", ["1.2.4", "1.10.0", "2.0.0"])
def test_definition_of_a_newer_release_stays(apply: Callable[..., Any], version: str) -> None:
    done, asked = apply(written_by(version))
    assert "newer release" in done
    assert version in done
    assert asked == ["GET"]


def test_silence_is_waited_out(apply: Callable[..., Any]) -> None:
    done, asked = apply(UnavailableError("busy"), SERVED, UnavailableError("busy"), {}, SERVED)
    assert (done, asked) == ("up to date", ["GET", "GET", "PATCH", "GET", "PATCH"])


def test_refusal_ends_at_once(apply: Callable[..., Any]) -> None:
    with pytest.raises(InvalidError, match="forbidden"):
        apply({}, InvalidError("forbidden"))


def test_silence_past_the_time_is_an_error(apply: Callable[..., Any]) -> None:
    with pytest.raises(UnavailableError):
        apply(UnavailableError("busy"), seconds=-1)


def test_definition_that_is_never_served_is_an_error(apply: Callable[..., Any]) -> None:
    with pytest.raises(ClusterError, match="does not serve it"):
        apply({}, {}, seconds=-1)


def test_missing_kubeconfig_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    missing = tmp_path / "none"
    assert crds_command.run(["apply", "--kubeconfig", str(missing)]) == 2
    assert str(missing) in capsys.readouterr().err
