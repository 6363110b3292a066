"""What changes a fingerprint and the digest of a model folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from inferscale_runtime.fingerprint import (
    Fingerprint,
    canonical_digest,
    model_digest,
    segment_key,
)

BASE: dict[str, Any] = {
    "model_digest": "aa",
    "architecture": "LlamaForCausalLM",
    "num_layers": 2,
    "num_kv_heads": 4,
    "head_dim": 8,
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
    "quantization": None,
    "preamble_token_ids": (1, 2),
    "fact_format": "- {text}\n",
    "policy": "none",
    "kv_dtype": "auto",
    "encoder_version": 1,
}
OTHER: dict[str, Any] = {
    "model_digest": "ab",
    "architecture": "MistralForCausalLM",
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rope": {"rope_type": "default", "rope_theta": 500000.0},
    "dtype": "bfloat16",
    "quantization": "awq",
    "preamble_token_ids": (1, 3),
    "fact_format": "* {text}\n",
    "policy": "all",
    "kv_dtype": "int8",
    "encoder_version": 2,
}


def test_no_field_is_forgotten_here() -> None:
    assert set(BASE) == set(OTHER) == set(Fingerprint.model_fields)


@pytest.mark.parametrize("name", sorted(BASE))
def test_every_field_changes_the_digest(name: str) -> None:
    changed = Fingerprint(**{**BASE, name: OTHER[name]})
    assert changed.digest != Fingerprint(**BASE).digest


def test_digest_is_stable() -> None:
    base = Fingerprint(**BASE)
    assert base.digest == Fingerprint.model_validate_json(base.model_dump_json()).digest
    assert canonical_digest({"a": 1, "b": 2}) == canonical_digest({"b": 2, "a": 1})
    assert len(base.digest) == 64
    # Stores of releases that knew no quantisation keep their fingerprint.
    older = {name: value for name, value in BASE.items() if name != "kv_dtype"}
    assert base.digest == canonical_digest({**older, "preamble_token_ids": [1, 2]})
    assert base.row_elements == 2 * 2 * 4 * 8


FILES = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "vocab.txt"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).write_bytes(b"abc" + name.encode())
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_byte_of_any_file_changes_the_model_digest(model: Path, name: str) -> None:
    before = model_digest(model)
    (model / name).write_bytes(b"abd" + name.encode())
    assert model_digest(model) != before


def test_names_count_and_notes_do_not(model: Path) -> None:
    before = model_digest(model)
    (model / "generation_config.json").write_text("{}")
    (model / "README.md").write_text("hello")
    assert model_digest(model) == before
    (model / "model.safetensors").rename(model / "other.safetensors")
    assert model_digest(model) != before


def test_hub_cache_links_digest_like_the_file(model: Path, tmp_path_factory: Any) -> None:
    before = model_digest(model)
    blobs = tmp_path_factory.mktemp("blobs")
    content = (model / "model.safetensors").read_bytes()
    blob = blobs / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(blob)
    assert model_digest(model) == before


def test_segment_key_depends_on_each_part() -> None:
    base = segment_key([1, 2], [("f", [3])], "fp")
    others = {
        segment_key([1], [("f", [3])], "fp"),
        segment_key([1, 2], [("g", [3])], "fp"),
        segment_key([1, 2], [("f", [4])], "fp"),
        segment_key([1, 2], [], "fp"),
        segment_key([1, 2], [("f", [3])], "fq"),
    }
    assert len(others | {base}) == 6
