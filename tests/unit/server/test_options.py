"""The ``memory`` object of a request, and the settings."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from inferscale_runtime.config import RuntimeConfig, load_config
from inferscale_runtime.encode.cli import parse_shard
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.server.options import MemoryOptions, MemoryUsage


def test_defaults() -> None:
    options = MemoryOptions.model_validate({"user": "maya"})
    assert (options.k, options.mode, options.link_tail, options.order) == (
        None,
        "injected",
        None,
        None,
    )


@pytest.mark.parametrize(
    "good",
    [
        {"user": "ü" * 256},
        {"user": "a", "k": 0},
        {"user": "a", "k": 1000, "link_tail": 1000, "mode": "text", "order": "stored"},
    ],
)
def test_accepted(good: dict[str, Any]) -> None:
    assert MemoryOptions.model_validate(good).user == good["user"]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({}, "user"),
        ({"user": ""}, "user"),
        ({"user": 3}, "user"),
        ({"user": None}, "user"),
        ({"user": "a\0b"}, "user"),
        ({"user": "a" * 513}, "user"),
        ({"user": "ü" * 257}, "user"),
        ({"user": "\ud800"}, "user"),
        ({"user": "a", "k": -1}, "k"),
        ({"user": "a", "k": 1001}, "k"),
        ({"user": "a", "k": "5"}, "k"),
        ({"user": "a", "k": 5.0}, "k"),
        ({"user": "a", "k": True}, "k"),
        ({"user": "a", "link_tail": -1}, "link_tail"),
        ({"user": "a", "mode": "none"}, "mode"),
        ({"user": "a", "order": "random"}, "order"),
        ({"user": "a", "top_k": 5}, "top_k"),
    ],
)
def test_refused_by_the_field_s_name(bad: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        MemoryOptions.model_validate(bad)
    assert caught.value.errors()[0]["loc"] == (field,)


def test_usage_has_the_documented_fields() -> None:
    assert MemoryUsage("none").as_dict() == {
        "mode": "none",
        "facts": 0,
        "injected_tokens": 0,
        "text_tokens": 0,
        "tier": None,
        "store_version": 0,
        "reason": None,
        "store": None,
        "session": None,
        "new_facts": 0,
    }


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"stor": "x"}', "stor"),
        ('{"retrieval": {"top_k": 2000}}', "retrieval.top_k"),
        ('{"retrieval": {"order": "x"}}', "retrieval.order"),
        ('{"retrieval": {"unknown_user": "x"}}', "retrieval.unknown_user"),
        ('{"prompt": {"fact_format": "no place"}}', "prompt.fact_format"),
        ('{"prompt": {"heading": ""}}', "prompt.heading"),
        ('{"tiers": {"dram_bytes": 5}}', "tiers.dram_bytes"),
        ('{"tiers": {"gpu_size": 5}}', "tiers.gpu_size"),
        ("[]", "document"),
        ("{", "document"),
    ],
)
def test_config_errors_name_file_and_field(text: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text, "my.json")
    assert str(caught.value).startswith(f"my.json: field '{field}': ")


def test_config_survives_the_way_to_the_plugins() -> None:
    config = load_config('{"store": "s", "retrieval": {"top_k": 7}}', "my.json")
    assert config.retrieval.top_k == 7
    assert RuntimeConfig.model_validate(config.model_dump(mode="json")) == config


def test_shards() -> None:
    assert parse_shard("0/1") == (0, 1)
    assert parse_shard("3/4") == (3, 4)


@pytest.mark.parametrize("text", ["", "1", "4/4", "-1/4", "0/0", "a/b", "0/1/2", "1/-2"])
def test_wrong_shards(text: str) -> None:
    with pytest.raises(ConfigError, match="--shard"):
        parse_shard(text)
