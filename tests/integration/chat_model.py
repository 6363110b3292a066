"""A tiny random Llama with the tokenizer and chat template of SmolLM2; it answers fast."""

from __future__ import annotations

import shutil
from pathlib import Path


def make_chat_model(smollm2: Path, folder: Path) -> Path:
    """Writes the model below ``folder`` and returns its path."""
    import torch
    import transformers as hf

    path = folder / "tiny-chat"
    path.mkdir()
    for file in smollm2.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and file.name != "config.json":
            shutil.copy(file, path / file.name)
    vocab = hf.AutoConfig.from_pretrained(smollm2).vocab_size
    torch.manual_seed(7)
    config = hf.LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    hf.LlamaForCausalLM(config).save_pretrained(path)
    return path
