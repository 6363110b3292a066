"""The command that writes the definitions and the reference page."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from inferscale_operator.api.crdgen import CRD_FOLDERS, generated_files, main
from inferscale_operator.api.crds import DEFINITIONS
from inferscale_operator.api.reference import PATH, reference_text

ROOT = Path(__file__).parents[4]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    assert main(["--root", str(tmp_path)]) == 0
    return tmp_path


def _check(root: Path) -> int:
    return main(["--check", "--root", str(root)])


def test_the_files_of_the_repository_are_those_of_the_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = _check(ROOT)

    assert capsys.readouterr().err == ""
    assert status == 0


def test_what_it_writes_is_clean(repository: Path) -> None:
    assert _check(repository) == 0
    written = {p.relative_to(repository).as_posix() for p in repository.rglob("*") if p.is_file()}
    assert written == {"pyproject.toml", *generated_files()}


@pytest.mark.parametrize("path", sorted(generated_files()))
def test_a_changed_file_is_named(
    repository: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / path).write_text("other")

    assert _check(repository) == 1
    assert f"{path} is out of date" in capsys.readouterr().err
    assert (repository / path).read_text() == "other"


@pytest.mark.parametrize("path", sorted(generated_files()))
def test_a_missing_file_is_named(
    repository: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / path).unlink()

    assert _check(repository) == 1
    assert f"{path} is missing" in capsys.readouterr().err


@pytest.mark.parametrize("folder", CRD_FOLDERS)
def test_a_left_over_definition_is_named(
    repository: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / folder / "inferscale.dev_oldthings.yaml").touch()

    assert _check(repository) == 1
    assert f"{folder}/inferscale.dev_oldthings.yaml belongs to no kind" in capsys.readouterr().err


def test_outside_a_repository_nothing_is_written(tmp_path: Path) -> None:
    assert main(["--root", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_chart_has_the_same_definitions() -> None:
    files = generated_files()
    first, second = (
        {Path(path).name: text for path, text in files.items() if path.startswith(f"{folder}/")}
        for folder in CRD_FOLDERS
    )

    assert len(second) == 2
    assert second == first


def test_the_files_are_plain_yaml() -> None:
    for path, text in generated_files().items():
        if path.endswith(".yaml"):
            assert yaml.safe_load(text)["kind"] == "CustomResourceDefinition"
            assert "&id" not in text


def test_the_page_names_every_field_and_rule() -> None:
    page = reference_text("command").replace("\\|", "|")

    for definition in DEFINITIONS:
        assert f"\n## {definition.model.__name__}\n" in page
        for rule in definition.model.rules:
            assert rule.message.partition(":")[0].removeprefix("metadata.name must have") in page
    for words in ("| `topK` | integer | `20` | 0 to 1,000 |", "minReplicas 0 needs scaleToZero"):
        assert words in page
    assert PATH in generated_files()


def test_links_of_the_page_lead_somewhere() -> None:
    page = reference_text("command")
    headings = {line.removeprefix("### ").lower() for line in page.splitlines() if "### " in line}
    links = {part.partition(")")[0] for part in page.split("](#")[1:]}

    assert links <= headings
    assert links
