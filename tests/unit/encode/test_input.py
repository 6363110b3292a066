from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from inferscale_runtime.encode.input import UserInput, parse_lines, read_inputs
from inferscale_runtime.errors import InputError
from inferscale_runtime.store.records import Fact, Turn


def read_input(path: str) -> dict[str, UserInput]:
    return read_inputs([path], max_bytes=1 << 30)


SECRET = "Zanzibar"
SAMPLE = Path(__file__).parents[3] / "runtime" / "inferscale_runtime" / "demo" / "sample.jsonl"


def fact(**changes: Any) -> dict[str, Any]:
    return {"kind": "fact", "user": "u", "id": "f1", "text": f"Likes {SECRET}"} | changes


def turn(**changes: Any) -> dict[str, Any]:
    base = {"kind": "turn", "user": "u", "id": "t1", "speaker": "Ann", "text": f"Hi {SECRET}"}
    return base | changes


def lines(*objects: dict[str, Any]) -> list[bytes]:
    return [json.dumps(each).encode() for each in objects]


def test_users_keep_file_order_and_link_facts_to_turns() -> None:
    users = parse_lines(
        lines(
            fact(id="b", turn="t1"),
            turn(time="noon"),
            fact(user="w", id="b", text="Other"),
            fact(id="a", text="  two \n words\t here ", time="May"),
        ),
        "x",
    )
    assert list(users) == ["u", "w"]
    assert users["u"].facts == (
        Fact("b", f"Likes {SECRET}", "t1"),
        Fact("a", "two words here", None, "May"),
    )
    assert users["u"].turns == (Turn("t1", "Ann", f"Hi {SECRET}", "noon"),)
    assert users["w"].facts == (Fact("b", "Other"),)


def test_identical_repetition_is_ignored() -> None:
    users = parse_lines(lines(turn(), fact(), turn(), fact(text=f" Likes  {SECRET}")), "x")
    assert len(users["u"].facts) == len(users["u"].turns) == 1


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (fact(text=" \n "), "text"),
        (fact(text="x" * 8193), "text"),
        (fact(text=7), "text"),
        (fact(speaker="Ann"), "speaker"),
        (fact(id=""), "id"),
        (fact(id=None), "id"),
        (fact(turn="t9"), "turn"),
        (fact(user=""), "user"),
        (fact(user="a\0b"), "user"),
        (fact(user="é" * 257), "user"),
        (fact(kind="memory"), "kind"),
        (fact(text="half \ud800"), "text"),
        (turn(turn="t1"), "turn"),
        (fact(id="first", text="changed"), "id"),
        (turn(id="first", text="changed"), "id"),
        ({k: v for k, v in fact().items() if k != "text"}, "text"),
        ({k: v for k, v in turn().items() if k != "speaker"}, "speaker"),
        ({k: v for k, v in fact().items() if k != "kind"}, "kind"),
        (fact(**{f"Likes {SECRET}": 1}), "?"),
    ],
)
def test_wrong_line_names_file_line_and_field_but_no_fact(bad: dict[str, Any], field: str) -> None:
    first = lines(fact(id="first"), turn(id="first"))
    with pytest.raises(InputError) as caught:
        parse_lines([*first, b"\n", *lines(bad)], "in.jsonl")
    assert (caught.value.source, caught.value.line, caught.value.field) == ("in.jsonl", 4, field)
    assert SECRET not in str(caught.value)
    assert str(caught.value).startswith("in.jsonl:4")


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kind": "fact", Zanzibar',
        b"[1]",
        b'"Zanzibar"',
        b'{"kind": "fact", "text": "Zanzibar \xff"}',
        b'{"kind": "fact", "text": "Zanzibar", "text": "b"}',
        b"[" * 100_000,
        b"1" * 5000,
    ],
)
def test_broken_json_is_an_input_error(raw: bytes) -> None:
    with pytest.raises(InputError) as caught:
        parse_lines([raw], "x")
    assert caught.value.line == 1
    assert SECRET not in str(caught.value)


def test_limits_are_inclusive() -> None:
    users = parse_lines(lines(fact(user="é" * 256, text="x" * 8192)), "x")
    assert len(users) == 1


def test_reads_file_with_bom_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines(turn(), fact())) + b"\r\n")
    assert len(read_input(str(path))["u"].facts) == 1


def test_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(lines(fact())))))
    assert list(read_input("-")) == ["u"]


def test_missing_file_and_folder_are_input_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match=r"cannot be read|holds no"):
            read_input(str(path))


def test_demo_sample_is_valid_and_every_fact_has_a_source() -> None:
    users = read_input(str(SAMPLE))
    assert list(users) == ["maya"]
    facts = users["maya"].facts
    assert len(facts) >= 75
    assert {t.speaker for t in users["maya"].turns} == {"Maya", "Leo"}
    assert all(f.turn_id for f in facts)
    assert all(18 <= len(f.text.split()) <= 26 for f in facts)
    assert len({f.text for f in facts}) == len(facts)


def test_origins_are_those_of_the_lines() -> None:
    both = lines(fact(origin="zep"), turn(), {"kind": "user", "user": "gone", "origin": "mem0"})
    users = parse_lines(both, "x")
    assert users["u"].origins == {"zep", ""}
    assert (users["u"].facts[0].origin, users["u"].turns[0].origin) == ("zep", "")
    assert users["gone"] == UserInput("gone", (), (), frozenset({"mem0"}))
    for origin, words in (("api", "memory API"), ("A b", "other signs")):
        with pytest.raises(InputError, match="field 'origin'") as caught:
            parse_lines(lines(fact(origin=origin)), "x")
        assert words in str(caught.value)
