"""Every supported architecture: injected KV gives what the same prompt gives as text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.integration.checkpoints import make_checkpoint
from tests.integration.engine import (
    Memory,
    assert_same,
    encode,
    encoder,
    max_difference,
    random_ids,
    random_pieces,
    serve,
)

from inferscale_runtime.errors import UnsupportedModelError

pytestmark = pytest.mark.vllm

NAMES = ["llama", "llama3", "mistral", "mistral-window", "qwen2", "qwen3"]


@pytest.mark.parametrize("name", NAMES)
def test_injected_equals_text(name: str, checkpoints: Path, tmp_path: Path) -> None:
    model = make_checkpoint(name, checkpoints)
    with encoder(model) as engine:
        memory = encode(engine, random_pieces(3))
    assert_oracle(model, memory)

    tail = random_ids(random.Random(4), 19)
    ids = (*memory.token_ids, *tail)
    with serve(model, tmp_path) as served:
        keys = served.put("a", memory)
        expected = served.text(ids)
        result = served.inject(keys, ids)
        assert served.loads[-1].last == len(memory.token_ids)
        assert_same(result, expected)
        # Part of the facts claimed, the others prefilled over them.
        assert_same(served.inject(keys[:6], ids), expected)

        # The control: other facts' KV in the same places must show, or the test proves nothing.
        # Equal lengths are not needed: the rows only have to add up.
        wrong = served.inject([keys[0], *reversed(keys[1:])], ids)
        assert max_difference(wrong, expected) > 1e-2


def assert_oracle(model: Path, memory: Memory) -> None:
    """Captured K before rope and V are those of transformers in float32."""
    import transformers as hf

    oracle = hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows: dict[tuple[int, int], torch.Tensor] = {}
    config = oracle.config
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )

    def keep(layer: int, kind: int):
        def hook(module: object, args: object, output: torch.Tensor) -> None:
            rows[layer, kind] = output[0].reshape(len(memory.token_ids), -1, head_dim)

        return hook

    for index, layer in enumerate(oracle.model.layers):
        attention = layer.self_attn
        getattr(attention, "k_norm", attention.k_proj).register_forward_hook(keep(index, 0))
        attention.v_proj.register_forward_hook(keep(index, 1))
    with torch.no_grad():
        oracle(torch.tensor([memory.token_ids]))
    captured = torch.cat(memory.kv)
    for (layer, kind), expected in rows.items():
        torch.testing.assert_close(captured[:, layer, kind], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "word"),
    [("gpt2", "GPT2LMHeadModel"), ("gemma2", "Gemma2ForCausalLM"), ("llama-yarn", "YaRN")],
)
def test_unsupported_models_stop_the_start(
    name: str, word: str, checkpoints: Path, tmp_path: Path
) -> None:
    model = make_checkpoint(name, checkpoints)
    with pytest.raises(UnsupportedModelError, match=word), serve(model, tmp_path):
        pass
    with pytest.raises(UnsupportedModelError, match=word), encoder(model):
        pass
