"""Which encodings of a store belong to the model that this server runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError

from inferscale_runtime.config import PromptConfig, RuntimeConfig
from inferscale_runtime.encode.model import make_fingerprint, make_template
from inferscale_runtime.errors import DamagedStoreError
from inferscale_runtime.prompt.template import Preamble, Template
from inferscale_runtime.store.store import Store


@dataclass(frozen=True, slots=True)
class Identity:
    """Template and fingerprint in use.

    Attributes:
        template: With the prompt texts that the store was encoded with.
        preamble: Tokens before the first fact.
        fingerprint: Digest, or ``""`` when the store has no encoding for this model.
        preamble_kv: ``[num_tokens, num_layers, 2, num_kv_heads, head_dim]``, or None.
        reason: Why nothing can be injected, or None.
        embedder: Embedder that the store was encoded with, ``""`` when unknown.
    """

    template: Template
    preamble: Preamble
    fingerprint: str
    preamble_kv: torch.Tensor | None
    reason: str | None
    embedder: str = ""


def find_identity(
    store: Store,
    config: RuntimeConfig,
    vllm_config: Any,
    digest: str,
    tokenizer: Any,
    chat_template: str | None,
    expected: str | None = None,
) -> Identity:
    """Finds the store's encoding for this model by computing the fingerprint anew.

    Prompt texts, policy and quantisation come from the store, everything else from the running
    model; only an equal digest is accepted. Of several, the one with the configured policy and
    quantisation wins. With ``expected`` no other fingerprint is looked at.
    """
    found: list[Identity] = []
    names = sorted(store.fingerprints())
    reason = "not_encoded"
    if expected is not None:
        if expected not in names:
            reason = "expected_fingerprint_missing"
        names = [name for name in names if name == expected]
    for name in names:
        reason = "fingerprint_mismatch" if reason == "not_encoded" else reason
        try:
            stored = store.read_preamble(name)
        except DamagedStoreError:
            reason = "preamble_damaged"
            continue
        if stored is None:
            continue
        fields, token_ids, kv = stored
        try:
            prompt = PromptConfig.model_validate(fields.get("prompt"))
        except ValidationError:
            continue
        template = make_template(tokenizer, prompt, chat_template)
        preamble = template.preamble()
        policy = str(fields.get("policy"))
        kv_dtype = str(fields.get("kv_dtype", "auto"))
        own = make_fingerprint(vllm_config, digest, preamble.token_ids, prompt, policy, kv_dtype)
        if own.digest == name and tuple(token_ids) == preamble.token_ids:
            identity = Identity(template, preamble, name, kv, None, str(fields.get("embedder", "")))
            if (policy, kv_dtype) == (config.encoding.policy, config.encoding.kv_dtype):
                return identity
            found.append(identity)
    if found:
        return found[0]
    template = make_template(tokenizer, config.prompt, chat_template)
    return Identity(template, template.preamble(), "", None, reason)


def embedder_name(config: RuntimeConfig, stored: str) -> str:
    """Which embedder reads the questions.

    Args:
        config: The server's settings.
        stored: The one that the store names. An endpoint is not taken from there: a store must not
            choose where questions and an API key are sent.
    """
    if config.retrieval.embedder:
        return config.retrieval.embedder
    if stored and not stored.startswith("openai:"):
        return stored
    return config.encoding.embedder
