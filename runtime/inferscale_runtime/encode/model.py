"""What encoder and server must agree on: template, preamble and fingerprint of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from inferscale_runtime.config import PromptConfig
from inferscale_runtime.encode.builtin import PREFIX, resolve_builtin
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.fingerprint import Fingerprint
from inferscale_runtime.prompt.template import Message, Template


def resolve_model(model: str, revision: str | None = None) -> str:
    """Folder of a model: built in, a local path, or a hub id through the hub's cache.

    Args:
        model: ``builtin:NAME``, a folder or a hub id.
        revision: Branch, tag or commit of a hub id. It needs no place in the fingerprint, which
            holds a hash of the files themselves.

    Raises:
        ConfigError: When it is none of them, or has no revisions.
    """
    path = Path(model)
    local = model.startswith(PREFIX) or path.is_dir()
    if local and revision:
        raise ConfigError(
            f"--revision '{revision}': only a hub id has revisions, and --model is '{model}'; "
            "leave one of them out"
        )
    if model.startswith(PREFIX):
        return str(resolve_builtin(model).resolve())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"--model '{model}': the folder holds no config.json")
        return str(path.resolve())
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, revision=revision))
    except Exception as error:
        wanted = f"{model}@{revision}" if revision else model
        raise ConfigError(
            f"--model '{wanted}': no such folder, and the hub did not give it "
            f"({type(error).__name__}); pass a model folder"
        ) from error


def make_template(tokenizer: Any, prompt: PromptConfig, chat_template: str | None) -> Template:
    """Binds a transformers tokenizer to the prompt layout.

    Args:
        tokenizer: With ``apply_chat_template`` and ``encode``.
        prompt: Fixed texts.
        chat_template: Overrides the tokenizer's own template.
    """

    def render(messages: list[Message], arguments: dict[str, Any]) -> str:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            chat_template=chat_template,
            **{"add_generation_prompt": True, **arguments},
        )
        return str(text)

    def tokenize(text: str) -> list[int]:
        # Templates write BOS and the other special tokens as text.
        return list(tokenizer.encode(text, add_special_tokens=False))

    return Template(render, tokenize, prompt)


class KVDimensions(TypedDict):
    """Shape and dtype of one token's KV, over all ranks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str


def kv_dimensions(vllm_config: Any) -> KVDimensions:
    """Reads the KV's dimensions from vLLM's resolved configuration."""
    model = vllm_config.model_config
    return KVDimensions(
        num_layers=model.get_num_layers(vllm_config.parallel_config),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def model_figures(vllm_config: Any, folder: str) -> dict[str, int | str]:
    """What a report says about a model, for planning memory and tensor parallelism.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        folder: The model's files.

    Returns:
        The dimensions of its KV, ``num_attention_heads`` and ``weight_bytes`` (files on disk).
    """
    config = vllm_config.model_config.hf_text_config
    sizes = [
        path.stat().st_size for path in Path(folder).iterdir() if path.suffix == ".safetensors"
    ]
    kv = kv_dimensions(vllm_config)
    return {
        "num_layers": kv["num_layers"],
        "num_kv_heads": kv["num_kv_heads"],
        "head_dim": kv["head_dim"],
        "dtype": kv["dtype"],
        "num_attention_heads": int(config.num_attention_heads),
        "weight_bytes": sum(sizes),
    }


def make_fingerprint(
    vllm_config: Any,
    digest: str,
    preamble: tuple[int, ...],
    prompt: PromptConfig,
    policy: str,
    kv_dtype: str = "auto",
) -> Fingerprint:
    """Builds the fingerprint from vLLM's resolved configuration.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        digest: ``model_digest`` of the model folder.
        preamble: Preamble tokens.
        prompt: Fixed texts.
        policy: Context policy.
        kv_dtype: How KV is stored.
    """
    model = vllm_config.model_config
    config = model.hf_text_config
    rope = getattr(config, "rope_parameters", None) or {}
    return Fingerprint(
        model_digest=digest,
        architecture=str((model.hf_config.architectures or ["?"])[0]),
        rope={key: rope[key] for key in sorted(rope)},
        quantization=model.quantization,
        preamble_token_ids=preamble,
        fact_format=prompt.fact_format,
        policy=policy,
        kv_dtype=kv_dtype,
        **kv_dimensions(vllm_config),
    )
