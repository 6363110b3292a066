"""The files of the web page: complete, from here only, and nothing of a text is read as markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import inferscale_runtime.server.page.routes as page
from inferscale_runtime.server.page.routes import FILES, PATH, attach_page

FOLDER = Path(page.__file__).parent / "static"


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    attach_page(app)
    return TestClient(app)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def tags() -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed((FOLDER / "index.html").read_text())
    return parser.tags


@pytest.mark.parametrize("path", FILES)
def test_every_file_is_served_under_a_strict_policy(client: TestClient, path: str) -> None:
    answer = client.get(PATH + path)
    assert answer.status_code == 200
    name, kind = FILES[path]
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == kind
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(
        part.strip().partition(" ")[::2]
        for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_no_file_is_left_out() -> None:
    assert {name for name, _ in FILES.values()} == {file.name for file in FOLDER.iterdir()}
    assert PATH + "/../v1/status" not in FILES


def test_nothing_inline_and_nothing_from_elsewhere() -> None:
    for tag, attributes in tags():
        assert tag != "style"
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        for name in ("src", "href"):
            link = attributes.get(name) or ""
            assert link in ("", "#main", "data:,") or re.fullmatch(r"ui/page\.(js|css)", link)
    for file in FOLDER.glob("*.js"):
        text = file.read_text()
        assert "://" not in text
        for sink in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
            assert sink not in text, f"{file.name}: {sink}"
        assert len(text.splitlines()) <= 200


def test_every_field_has_a_label_and_every_name_exists() -> None:
    ids = [attributes["id"] for _, attributes in tags() if "id" in attributes]
    assert len(ids) == len(set(ids))
    labelled = {attributes.get("for") for tag, attributes in tags() if tag == "label"}
    for tag, attributes in tags():
        if tag in ("input", "textarea", "select"):
            assert attributes["id"] in labelled
        for name in ("for", "aria-labelledby", "aria-describedby"):
            assert attributes.get(name) is None or attributes[name] in ids
    used = set()
    for file in FOLDER.glob("*.js"):
        used |= set(re.findall(r"""byId\("([\w-]+)"\)""", file.read_text()))
        used |= set(re.findall(r"""\bon\("([\w-]+)",""", file.read_text()))
    assert used <= set(ids)
    assert used
