from __future__ import annotations

import json
from typing import Any

import pytest

from inferscale_operator.api.memorystore import MemoryStoreSpec
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.runtime_config import config_text, encode_config, serve_config
from inferscale_operator.desired.stores import StoreView
from inferscale_runtime.budget import ConfigError
from inferscale_runtime.config import RuntimeConfig, StoreEntry, load_config

ENDPOINT = "openai:bge@https://one.example/v1"


def _store(**fields: Any) -> MemoryStoreSpec:
    base = {"model": {"id": "m"}, "source": {"configMap": {"name": "facts"}}}
    return MemoryStoreSpec.model_validate(base | fields)


def _model(*stores: str, **fields: Any) -> PersonalizedModelSpec:
    named = [{"name": name} for name in stores]
    base = {"model": {"id": "m"}, "memoryStores": named}
    return PersonalizedModelSpec.model_validate(base | fields)


def _view(name: str, digit: str = "a", **fields: Any) -> StoreView:
    return StoreView(name, _store(**fields), digit * 64)


def _read(config: dict[str, Any]) -> RuntimeConfig:
    return load_config(config_text(config), "test")


def test_a_job_reads_what_the_store_says() -> None:
    config = _read(
        encode_config(
            "maya",
            _store(
                prompt={"heading": "H", "factFormat": "<{text}>", "footer": "F"},
                encoding={"policy": "turns:3", "embedder": ENDPOINT},
                quota={"maxBytes": "1.5Gi", "maxFactsPerUser": 7},
                retention={"maxAgeDays": 30},
            ),
        )
    )
    assert config.store == "/store"
    assert (config.prompt.heading, config.prompt.fact_format, config.prompt.footer) == (
        "H",
        "<{text}>",
        "F",
    )
    assert (config.encoding.policy, config.encoding.embedder) == ("turns:3", ENDPOINT)
    assert config.retrieval.embedder_api_key_file == ""
    assert (config.quota.max_store_bytes, config.quota.max_facts_per_user) == (3 << 29, 7)
    assert config.retention.max_age_days == 30


def test_object_storage_is_opened_by_its_url() -> None:
    storage = {"s3": {"url": "s3://bucket/prefix"}}
    assert _read(encode_config("maya", _store(storage=storage))).store == "s3://bucket/prefix"
    config = _read(serve_config(_model("a"), [_view("a", storage=storage)]))
    assert config.stores[0].url == "s3://bucket/prefix"


def test_a_server_reads_what_the_model_says() -> None:
    spec = _model(
        "a",
        "b",
        retrieval={"topK": 3, "linkTail": 1, "minScore": 0.5, "order": "stored"},
        tiers={"dram": "2Gi", "stageTimeoutMs": 7},
    )
    config = _read(serve_config(spec, [_view("a"), _view("b", "b")]))
    assert config.stores == (
        StoreEntry(name="a", url="/stores/a", expected_fingerprint="a" * 64, writable=False),
        StoreEntry(name="b", url="/stores/b", expected_fingerprint="b" * 64, writable=False),
    )
    assert (config.retrieval.top_k, config.retrieval.link_tail) == (3, 1)
    assert (config.retrieval.min_score, config.retrieval.order) == (0.5, "stored")
    assert (config.tiers.dram_bytes, config.tiers.stage_timeout_ms) == (2 << 30, 7)


def test_a_server_writes_the_stores_that_have_no_other_source_and_keeps_their_quota() -> None:
    written = _view("b", "b", source={"api": {}}, quota={"maxFactsPerUser": 7, "maxBytes": "1Gi"})
    config = _read(serve_config(_model("a", "b"), [_view("a"), written]))
    assert [entry.writable for entry in config.stores] == [False, True]
    assert (config.quota.max_facts_per_user, config.quota.max_store_bytes) == (7, 1 << 30)


def test_an_endpoint_and_its_key_come_from_the_store_that_has_them() -> None:
    encoding = {"embedder": ENDPOINT, "embedderApiKeySecretRef": {"name": "s", "key": "k"}}
    stores = [_view("a"), _view("b", encoding=encoding)]
    config = _read(serve_config(_model("a", "b"), stores))
    assert config.encoding.embedder == ENDPOINT
    assert config.retrieval.embedder_api_key_file == "/etc/inferscale-secrets/embedder/api-key"
    # The local store keeps its own embedder: the runtime reads it from the store.
    assert config.retrieval.embedder == ""


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["int8"], "int8"),
        (["fp8", "fp8"], "fp8"),
        (["int8", "fp8"], "auto"),
        (["int8", "auto"], "auto"),
        (["auto"], "auto"),
    ],
)
def test_arenas_are_quantised_when_all_stores_are(kinds: list[str], expected: str) -> None:
    names = "ab"[: len(kinds)]
    stores = [
        _view(name, name, encoding={"kvDtype": kind})
        for name, kind in zip(names, kinds, strict=True)
    ]
    document = serve_config(_model(*names), stores)
    assert _read(document).encoding.kv_dtype == expected
    # Written only where it says something: a release that knows it must not restart the others.
    assert ("kv_dtype" in document["encoding"]) == (expected != "auto")
    job = encode_config("a", _store(encoding={"kvDtype": kinds[0]}))
    assert _read(job).encoding.kv_dtype == kinds[0]


def test_only_what_the_spec_decides_is_written() -> None:
    document = serve_config(_model("a"), [_view("a")])
    assert "warm" not in document["tiers"]
    assert "run_dir" not in document


def test_texts_of_other_languages_stay_readable() -> None:
    text = config_text(encode_config("maya", _store(prompt={"heading": "Über dich:\n"})))
    assert "Über dich" in text
    assert json.loads(text)["prompt"]["heading"] == "Über dich:\n"


def test_a_size_that_is_too_small_is_named() -> None:
    tiers = _model("a").tiers.model_copy(update={"dram": "10Ki"})
    spec = _model("a").model_copy(update={"tiers": tiers})
    with pytest.raises(ConfigError, match=r"spec\.tiers\.dram '10Ki': must be at least 1Mi"):
        serve_config(spec, [_view("a")])
    quota = _store().quota.model_copy(update={"max_bytes": "0"})
    with pytest.raises(ConfigError, match=r"spec\.quota\.maxBytes '0'"):
        encode_config("maya", _store().model_copy(update={"quota": quota}))
