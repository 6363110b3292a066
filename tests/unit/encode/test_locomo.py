from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferscale_runtime.encode.input import UserInput, parse_lines
from inferscale_runtime.encode.locomo import convert
from inferscale_runtime.errors import InputError

ROOT = Path(__file__).parents[3]
LOCOMO = Path(os.environ.get("INFERSCALE_LOCOMO", ROOT.parent / "shared" / "locomo.json"))

# Written for this test in LoCoMo's shape, with the irregularities that the real file has.
TINY: list[dict[str, Any]] = [
    {
        "sample_id": "conv-1",
        "qa": [],
        "conversation": {
            "speaker_a": "Ann",
            "speaker_b": "Ben",
            "session_10_date_time": "noon on 2 May",
            "session_10": [{"speaker": "Ben", "dia_id": "D10:1", "text": "I moved to Oslo."}],
            "session_2_date_time": "noon on 1 May",
            "session_2": [
                {"speaker": "Ann", "dia_id": "D2:1", "text": "I bake.", "img_url": ["x"]},
                {"speaker": "Ben", "dia_id": "D2:2", "text": "I run."},
            ],
            "session_11_date_time": "a session without turns",
        },
        "observation": {
            "session_10_observation": {"Ben": [["Ben lives in Oslo.", "D10:1, D2:2"]]},
            "session_2_observation": {
                "Ann": [["Ann is busy.", "D99:1"], ["Ann knows that Ben runs.", "D2:2"]],
                "Ben": [["Ben hears that Ann bakes.", ["D2:1", "D2:2"]], ["Ben nods.", []]],
            },
        },
    }
]


def read(path: Path) -> dict[str, UserInput]:
    return parse_lines([json.dumps(line).encode() for line in convert(str(path))], str(path))


def write(tmp_path: Path, value: object) -> Path:
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps(value))
    return path


def test_sessions_and_facts_come_in_conversation_order(tmp_path: Path) -> None:
    user = read(write(tmp_path, TINY))["conv-1"]
    assert [t.id for t in user.turns] == ["D2:1", "D2:2", "D10:1"]
    assert [(f.id, f.text, f.turn_id) for f in user.facts] == [
        ("S2:F3", "Ben hears that Ann bakes. (noon on 1 May)", "D2:1"),
        ("S2:F2", "Ann knows that Ben runs. (noon on 1 May)", "D2:2"),
        ("S2:F1", "Ann is busy. (noon on 1 May)", None),
        ("S2:F4", "Ben nods. (noon on 1 May)", None),
        ("S10:F1", "Ben lives in Oslo. (noon on 2 May)", "D10:1"),
    ]


def _drop(value: list[dict[str, Any]], *path: str) -> list[dict[str, Any]]:
    here: Any = value[0]
    for key in path[:-1]:
        here = here[key]
    del here[path[-1]]
    return value


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (lambda d: {"data": d}, ""),
        (lambda d: [1], "[0]"),
        (lambda d: d + d, "[1].sample_id"),
        (lambda d: _drop(d, "observation"), "[0].observation"),
        (
            lambda d: _drop(d, "conversation", "session_2_date_time"),
            "[0].conversation.session_2_date_time",
        ),
        (
            lambda d: _drop(d, "conversation", "session_10"),
            "[0].observation.session_10_observation",
        ),
    ],
)
def test_other_shapes_are_input_errors(
    tmp_path: Path, damage: Callable[[list[dict[str, Any]]], object], field: str
) -> None:
    path = write(tmp_path, damage(copy.deepcopy(TINY)))
    with pytest.raises(InputError, match="LoCoMo") as caught:
        read(path)
    assert caught.value.field == field


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b'{"kind": "fact"}\n{}'])
def test_file_that_is_no_json_is_an_input_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(InputError):
        list(convert(str(path)))
    with pytest.raises(InputError, match="cannot be read"):
        list(convert(str(tmp_path / "absent")))


@pytest.mark.skipif(
    not LOCOMO.is_file(), reason=f"LoCoMo is not at {LOCOMO}; set INFERSCALE_LOCOMO to its path"
)
def test_real_locomo_converts_completely() -> None:
    data = json.loads(LOCOMO.read_text(encoding="utf-8"))
    users = read(LOCOMO)
    assert list(users) == [c["sample_id"] for c in data]
    for conversation, user in zip(data, users.values(), strict=True):
        observed = conversation["observation"].values()
        expected = sum(len(entries) for o in observed for entries in o.values())
        assert len(user.facts) == expected > 0
        assert len({t.id for t in user.turns}) == len(user.turns) > 0
        assert all(f.turn_id is not None and f.text.endswith(")") for f in user.facts)
