"""The fingerprint: a hash of everything a stored key or value depends on (design section 2).

Two segments may stand in one prompt only if their fingerprints are equal, and a server injects only
segments of the fingerprint that it computed from its own model folder. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

ENCODER_VERSION = 1
"""Raised whenever the encoder's bytes change for the same input."""

_MODEL_SUFFIXES = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".tiktoken")
_NOT_MODEL = ("generation_config.json", "README.txt", "inferscale-demo.json")
_READ_BYTES = 4 << 20


class Fingerprint(BaseModel):
    """Readable fields; ``digest`` is the identity.

    Attributes:
        model_digest: SHA-256 over weights, config, tokenizer and chat template files.
        architecture: Class name in the model's config.
        num_layers: Layers with a KV cache.
        num_kv_heads: KV heads in all, over all ranks.
        head_dim: Elements of one head.
        rope: Rope parameters as the config gives them.
        dtype: dtype of the stored KV (and of the model's activations).
        quantization: vLLM's weight quantisation method, or None.
        preamble_token_ids: Tokens before the first fact.
        fact_format: How a fact is written.
        policy: Context policy.
        kv_dtype: How KV is stored: ``auto``, or the quantisation.
        encoder_version: See ``ENCODER_VERSION``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model_digest: str
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: dict[str, Any]
    dtype: str
    quantization: str | None
    preamble_token_ids: tuple[int, ...]
    fact_format: str
    policy: str
    kv_dtype: str = "auto"
    encoder_version: int = ENCODER_VERSION

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the canonical JSON of all fields.

        A ``kv_dtype`` of ``auto`` is left out: it means what a fingerprint without it meant.
        """
        plain = {"kv_dtype"} if self.kv_dtype == "auto" else None
        return canonical_digest(self.model_dump(mode="json", exclude=plain))

    @property
    def row_elements(self) -> int:
        """Elements of one token's KV: layers x 2 x heads x head_dim."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


def canonical_digest(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """Hex SHA-256 of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def segment_key(
    token_ids: Sequence[int],
    context: Sequence[tuple[str, Sequence[int]]],
    fingerprint: str,
) -> str:
    """Key of one fact's segment: what its bytes depend on, so that only changed facts are encoded.

    Args:
        token_ids: The fact's tokens.
        context: ``(id, tokens)`` of each fact or turn read before it, in order.
        fingerprint: Digest of the fingerprint.

    Returns:
        64 hex characters.
    """
    return canonical_digest(
        {
            "tokens": list(token_ids),
            "context": [[name, list(ids)] for name, ids in context],
            "fingerprint": fingerprint,
        }
    )


def _file_digest(path: Path) -> str:
    target = os.path.realpath(path)
    name = os.path.basename(target)
    # Hub caches link to blobs that are named by their SHA-256: no need to read 16 GB again.
    if os.path.islink(path) and len(name) == 64 and set(name) <= set("0123456789abcdef"):
        return name
    digest = hashlib.sha256()
    with open(target, "rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def model_digest(folder: str | Path) -> str:
    """Hashes the files of a model folder that its KV can depend on.

    Args:
        folder: Folder with ``config.json``, weights and tokenizer.

    Returns:
        Hex SHA-256 over the sorted names and contents.
    """
    root = Path(folder)
    names = sorted(
        path.name
        for path in root.iterdir()
        if path.is_file() and path.suffix in _MODEL_SUFFIXES and path.name not in _NOT_MODEL
    )
    return canonical_digest([[name, _file_digest(root / name)] for name in names])
