from __future__ import annotations

from typing import Any

import pytest

from inferscale_operator.desired.naming import stamp
from inferscale_operator.planner.drift import differs


def _live(desired: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**desired, "status": {"x": 1}, **changes}


WANTED = stamp(
    {
        "metadata": {"name": "a", "labels": {"l": "1"}},
        "spec": {
            "selector": {"app": "x"},
            "size": "1Gi",
            "empty": {},
            "list": [{"n": 1}, {"n": 2}],
        },
    }
)
SPEC = WANTED["spec"]


def test_what_was_applied_does_not_differ() -> None:
    assert not differs(WANTED, _live(WANTED))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({**SPEC, "defaulted": True}, False),
        ({**SPEC, "size": "1024Mi"}, False),
        ({**SPEC, "size": "1025Mi"}, True),
        ({**SPEC, "empty": None}, False),
        ({k: v for k, v in SPEC.items() if k != "empty"}, False),
        ({**SPEC, "list": [{"n": 1, "defaulted": 0}, {"n": 2}]}, False),
        ({**SPEC, "list": [{"n": 2}, {"n": 1}]}, True),
        ({**SPEC, "list": [{"n": 1}, {"n": 2}, {"n": 3}]}, True),
        ({**SPEC, "list": [{"n": 1}]}, True),
        ({**SPEC, "selector": {"app": "x", "more": "y"}}, True),
        ({**SPEC, "selector": None}, True),
        (None, True),
    ],
)
def test_spec(spec: Any, expected: bool) -> None:
    assert differs(WANTED, _live(WANTED, spec=spec)) is expected


def test_halves_are_not_ones() -> None:
    wanted = stamp({"metadata": {"name": "a"}, "spec": {"cpu": "500m"}})
    assert differs(wanted, _live(wanted, spec={"cpu": "1"}))
    assert not differs(wanted, _live(wanted, spec={"cpu": "0.5"}))


def test_a_field_that_is_not_wanted_any_more_differs() -> None:
    older = stamp({**WANTED, "spec": {**SPEC, "former": 1}})
    assert differs(WANTED, _live(older))


def test_a_lost_label_differs() -> None:
    metadata = {**WANTED["metadata"], "labels": {}}
    assert differs(WANTED, _live(WANTED, metadata=metadata))
