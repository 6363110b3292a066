from __future__ import annotations

from pathlib import Path

import pytest

from inferscale_operator.settings import Settings, flag, read_settings, variable

NO_FILE = Path("/nonexistent")


def test_defaults() -> None:
    settings = read_settings([], {}, NO_FILE)
    assert settings.namespaces == ()
    assert settings.lease_place == "default"
    assert settings.http_port == 8080


def test_flag_beats_environment_beats_default() -> None:
    environment = {"INFERSCALE_WORKERS": "3", "INFERSCALE_LOG_LEVEL": "debug"}
    settings = read_settings(["--workers", "5"], environment, NO_FILE)
    assert (settings.workers, settings.log_level) == (5, "debug")


def test_namespaces_are_separated_by_commas() -> None:
    settings = read_settings(["--namespaces", "a, b,"], {}, NO_FILE)
    assert settings.namespaces == ("a", "b")
    assert settings.lease_place == "a"


def test_monitor_labels_are_pairs() -> None:
    arguments = ["--monitor-labels", "release=prom, a.b/c=", "--metrics-namespaces", "m"]
    settings = read_settings(arguments, {}, NO_FILE)
    assert settings.label_pairs == (("release", "prom"), ("a.b/c", ""))
    assert settings.metrics_namespaces == ("m",)


def test_own_namespace_is_found_inside_a_pod(tmp_path: Path) -> None:
    file = tmp_path / "namespace"
    file.write_text("system\n")
    settings = read_settings([], {}, file)
    assert settings.operator_namespace == "system"
    assert settings.lease_place == "system"
    assert read_settings(["--lease-namespace", "x"], {}, file).lease_place == "x"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--workers", "0"], "--workers '0'"),
        (["--workers", "many"], "--workers 'many'"),
        (["--namespaces", "Not_A_Name"], "--namespaces"),
        (["--monitor-labels", "release"], "--monitor-labels"),
        (["--log-level", "loud"], "--log-level 'loud'"),
        (["--http-port", "70000"], "--http-port '70000'"),
    ],
)
def test_wrong_value_is_named(arguments: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=r"^--") as caught:
        read_settings(arguments, {}, NO_FILE)
    assert text in str(caught.value)


def test_wrong_variable_is_named_by_its_flag() -> None:
    with pytest.raises(ValueError, match="--lease-seconds 'soon'"):
        read_settings([], {"INFERSCALE_LEASE_SECONDS": "soon"}, NO_FILE)


def test_help_documents_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_settings(["--help"], {}, NO_FILE)
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert f"{flag(name)} VALUE" in text
        assert f"[{variable(name)}]" in text
        assert field.description


def test_documentation_page_names_every_setting() -> None:
    page = (Path(__file__).parents[4] / "docs" / "operator.md").read_text()
    missing = [name for name in Settings.model_fields if f"`{flag(name)}`" not in page]
    assert missing == []
