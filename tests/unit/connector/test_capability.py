"""The capability: only this server's claims are honoured."""

from __future__ import annotations

from typing import Any

import pytest

from inferscale_runtime.connector.capability import Claim, cache_salt, open_claim, seal_claim

SECRET = b"s" * 32
PROMPT = list(range(10))
CLAIM = Claim(5, ((0, 2), (7, 3)), 4, 9)


def test_round_trip() -> None:
    value = seal_claim(SECRET, CLAIM, "salt", PROMPT)
    assert open_claim(SECRET, value, "salt", PROMPT) == CLAIM


@pytest.mark.parametrize(
    "change",
    [
        {"n": 4},
        {"runs": [[0, 2], [8, 3]]},
        {"lease": [5, 9]},
        {"lease": [4, 8]},
        {"code": "0" * 64},
    ],
)
def test_tampering_is_refused(change: dict[str, Any]) -> None:
    value = {**seal_claim(SECRET, CLAIM, "salt", PROMPT), **change}
    assert open_claim(SECRET, value, "salt", PROMPT) is None


def test_claim_is_bound_to_prompt_salt_and_secret() -> None:
    value = seal_claim(SECRET, CLAIM, "salt", PROMPT)
    assert open_claim(SECRET, value, "other", PROMPT) is None
    assert open_claim(SECRET, value, None, PROMPT) is None
    assert open_claim(SECRET, value, "salt", [9, *PROMPT[1:]]) is None
    assert open_claim(b"t" * 32, value, "salt", PROMPT) is None


@pytest.mark.parametrize("junk", [None, 3, "x", [], {}, {"n": "x"}, {"runs": 3, "lease": 1}])
def test_junk_is_refused(junk: object) -> None:
    assert open_claim(SECRET, junk, "salt", PROMPT) is None


def test_salt_depends_on_everything() -> None:
    base = ("tenant", "user", "print", ("a", "b"), "injected", 0)
    others = [
        ("x", *base[1:]),
        (base[0], "x", *base[2:]),
        (*base[:2], "x", *base[3:]),
        (*base[:3], ("b", "a"), *base[4:]),
        (*base[:4], "text", 0),
        (*base[:5], 1),
    ]
    salts = {cache_salt(SECRET, *arguments) for arguments in [base, *others]}
    assert len(salts) == 7
    assert all(len(salt) == 64 and salt.isalnum() for salt in salts)
    assert cache_salt(b"t" * 32, *base) not in salts


@pytest.mark.parametrize(
    "change",
    [
        {"n": float("inf")},
        {"n": float("nan")},
        {"n": None},
        {"n": 0},
        {"n": -5},
        {"runs": [[0, 5]]},
        {"runs": [[0]]},
        {"runs": [[7, 3], [0, 2]]},
        {"runs": [[0, 2], [7, 3], [9, 0]]},
        {"runs": [[float("inf"), 5]]},
        {"lease": [4]},
        {"lease": [4, 9, 1]},
        {"code": ""},
        {"code": None},
        {"code": "é" * 64},
        {"code": "\ud800"},
    ],
)
def test_odd_values_are_refused_without_an_exception(change: dict[str, Any]) -> None:
    value = {**seal_claim(SECRET, CLAIM, "salt", PROMPT), **change}
    assert open_claim(SECRET, value, "salt", PROMPT) is None


@pytest.mark.parametrize("name", ["n", "runs", "lease", "code"])
def test_missing_parts_are_refused(name: str) -> None:
    value = seal_claim(SECRET, CLAIM, "salt", PROMPT)
    del value[name]
    assert open_claim(SECRET, value, "salt", PROMPT) is None


def test_only_claimed_tokens_are_bound_and_one_token_is_left_to_compute() -> None:
    value = seal_claim(SECRET, CLAIM, "salt", PROMPT)
    assert open_claim(SECRET, value, "salt", [*PROMPT[:5], 99, 98]) == CLAIM
    assert open_claim(SECRET, value, "salt", PROMPT[:5]) is None
    assert open_claim(SECRET, value, "salt", []) is None


def test_empty_salt_is_refused_though_sealed() -> None:
    assert open_claim(SECRET, seal_claim(SECRET, CLAIM, "", PROMPT), "", PROMPT) is None
