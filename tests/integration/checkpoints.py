"""Tiny randomly initialised checkpoints; prompts are token ids, so they have no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 1000
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    # Wider than usual, so that logits differ clearly and attention is not flat.
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def _config(name: str) -> Any:
    import transformers as hf

    shape = dict(SHAPE)
    if name == "gpt2":
        return hf.GPT2Config(vocab_size=VOCAB, n_embd=128, n_layer=2, n_head=4, n_positions=1024)
    if name == "gemma2":
        return hf.Gemma2Config(**(shape | {"tie_word_embeddings": True}), sliding_window=64)
    if name == "llama":
        return hf.LlamaConfig(**shape, rope_parameters=PLAIN_ROPE)
    if name == "llama3":
        # Heads of 64 as well as of 32.
        return hf.LlamaConfig(**(shape | {"head_dim": 64}), rope_parameters=LLAMA3_ROPE)
    if name == "llama-yarn":
        return hf.LlamaConfig(**shape, rope_parameters=YARN_ROPE)
    if name == "mistral":
        return hf.MistralConfig(**shape, rope_parameters=PLAIN_ROPE, sliding_window=None)
    if name == "mistral-window":
        return hf.MistralConfig(**shape, rope_parameters=PLAIN_ROPE, sliding_window=64)
    if name == "qwen2":
        del shape["head_dim"]
        return hf.Qwen2Config(**shape, rope_parameters=PLAIN_ROPE, use_sliding_window=False)
    if name == "qwen3":
        return hf.Qwen3Config(**shape, rope_parameters=PLAIN_ROPE, use_sliding_window=False)
    raise ValueError(name)


def make_checkpoint(name: str, folder: Path) -> Path:
    """Writes checkpoint ``name`` below ``folder`` and returns its path."""
    import torch
    import transformers as hf

    path = folder / name
    torch.manual_seed(7)
    model = hf.AutoModelForCausalLM.from_config(_config(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Biases and norms start as zeros and ones; a capture at the wrong place must show.
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "q_norm" in parameter_name or "k_norm" in parameter_name:
                parameter.uniform_(0.5, 2)
    model.save_pretrained(path)
    return path
