"""The settings document: what is refused, and how stores are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferscale_runtime.config import RuntimeConfig, StoreEntry, load_config
from inferscale_runtime.errors import ConfigError

DIGEST = "ab" * 32


def load(**fields: Any) -> RuntimeConfig:
    return load_config(json.dumps(fields), "config.json")


def test_short_and_long_form_give_the_same_entries() -> None:
    short = load(store="/data/store")
    long = load(stores=[{"name": "default", "url": "/data/store"}])
    assert short.store_entries == long.store_entries
    assert load().store_entries == ()


def test_stores_keep_their_order_and_pins() -> None:
    config = load(
        stores=[
            {"name": "b", "url": "s3://x/b", "expected_fingerprint": DIGEST},
            {"name": "a.example-1", "url": "/a"},
        ]
    )
    assert config.store_entries == (
        StoreEntry(name="b", url="s3://x/b", expected_fingerprint=DIGEST),
        StoreEntry(name="a.example-1", url="/a"),
    )
    assert RuntimeConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"store": "/a", "stores": [{"name": "b", "url": "/b"}]}, ["store", "stores"]),
        ({"stores": [{"name": "b", "url": "/b"}, {"name": "b", "url": "/c"}]}, ["'b'", "twice"]),
        ({"stores": [{"name": "B", "url": "/b"}]}, ["stores.0.name"]),
        ({"stores": [{"name": "b", "url": ""}]}, ["stores.0.url"]),
        ({"stores": [{"name": "b", "url": "/b", "expected_fingerprint": "12"}]}, ["expected_"]),
        ({"stores": [{"name": f"s{n}", "url": "/b"} for n in range(17)]}, ["stores", "16"]),
        ({"quota": {"max_facts_per_user": 0}}, ["quota.max_facts_per_user"]),
        ({"quota": {"max_store_bytes": "many"}}, ["quota.max_store_bytes"]),
        ({"retention": {"max_age_days": 0}}, ["retention.max_age_days"]),
        ({"tiers": {"warm_bytes": -1}}, ["tiers.warm_bytes"]),
        ({"encoding": {"max_input_bytes": 0}}, ["encoding.max_input_bytes"]),
        ({"colour": 1}, ["colour"]),
    ],
)
def test_refused_by_name(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**fields)
    for word in words:
        assert word in str(caught.value)
