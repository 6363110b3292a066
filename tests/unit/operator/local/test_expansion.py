from __future__ import annotations

import json

import pytest

from inferscale_operator.local.expansion import expand, local_arguments, rewrite, rewrite_json

MOUNTS = {"/store": "/data/s", "/store/x": "/data/x", "/tmp/": "/data/t"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("a$(A)b$(B)c", "a1b2c"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$$$$(A)", "$$(A)"),
        ("$(NONE)", "$(NONE)"),
        ("$A", "$A"),
        ("$(A", "$(A"),
        ("$", "$"),
        ("$()", "$()"),
        ("$(A$(B))", "$(A$(B))"),
    ],
)
def test_expand(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expected


def test_values_are_not_expanded_again() -> None:
    assert expand("$(A)", {"A": "$(B)", "B": "2"}) == "$(B)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/store", "/data/s"),
        ("/store/a/b", "/data/s/a/b"),
        ("/store/x/b", "/data/x/b"),
        ("/stores/x", "/stores/x"),
        ("--store=/store/a", "--store=/data/s/a"),
        ("a=b=/store", "a=b=/store"),
        ("/tmp", "/data/t"),
        ("/tmp/a", "/data/t/a"),
        ("see /store", "see /store"),
        ("s3://store", "s3://store"),
        ("", ""),
    ],
)
def test_rewrite(text: str, expected: str) -> None:
    assert rewrite(text, MOUNTS) == expected


def test_rewrite_json_changes_strings_that_start_with_a_mount_and_nothing_else() -> None:
    document = {"store": "/store/a", "list": ["/tmp/b", 1, None], "/store": "x", "t": "in /store"}
    changed = json.loads(rewrite_json(json.dumps(document), MOUNTS))
    assert changed == {
        "store": "/data/s/a",
        "list": ["/data/t/b", 1, None],
        "/store": "x",
        "t": "in /store",
    }


@pytest.mark.parametrize("text", ['{"a":   "b"}', "no json", '{"a": "/store"}\n{"b": "/store"}'])
def test_rewrite_json_leaves_other_texts_byte_for_byte(text: str) -> None:
    assert rewrite_json(text, MOUNTS) == text


def test_listening_on_all_interfaces_becomes_loopback() -> None:
    words = ["--host", "0.0.0.0", "--bind=0.0.0.0", "10.0.0.0.0"]
    assert local_arguments(words) == ["--host", "127.0.0.1", "--bind=127.0.0.1", "10.0.0.0.0"]
