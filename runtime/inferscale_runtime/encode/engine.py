"""The encoder's engine: token ids in, the KV rows of their ends out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from inferscale_runtime.errors import UnsupportedModelError


def keep_engine_in_this_process() -> None:
    """Has vLLM start its engine without a process of its own, and quietly.

    Call it before vLLM is imported: its settings are read at import or at the engine's start.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """One prompt to read.

    Attributes:
        name: Unique within a call.
        token_ids: Context and fact.
        keep: How many rows at the end are kept.
    """

    name: str
    token_ids: tuple[int, ...]
    keep: int


class EncodeEngine:
    """vLLM in this process, eager, with capture hooks.

    Args:
        model: Model folder.
        dtype: vLLM dtype (``auto``, ``float32``, ``bfloat16`` …).
        max_model_len: Longest prompt, or None for the model's own.
        kv_cache_bytes: Size of the engine's KV cache; the shadow pool is as large again.
        engine_options: Further arguments of vLLM's ``LLM``.
    """

    def __init__(
        self,
        model: str,
        dtype: str,
        max_model_len: int | None,
        *,
        kv_cache_bytes: int = 1 << 30,
        **engine_options: Any,
    ) -> None:
        keep_engine_in_this_process()
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from inferscale_runtime.encode import capture

        self._sink = capture.reset_sink()
        self._llm = LLM(
            model,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=max_model_len,
            distributed_executor_backend="uni",
            enable_prefix_caching=True,
            kv_cache_memory_bytes=kv_cache_bytes,
            disable_hybrid_kv_cache_manager=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector=capture.CAPTURE_CONNECTOR_NAME,
                kv_connector_module_path=capture.__name__,
                kv_role="kv_consumer",
            ),
            **engine_options,
        )
        engine = self._llm.llm_engine
        self.vllm_config: Any = engine.vllm_config
        if self._sink.pool is None:
            raise UnsupportedModelError("model: it has no KV cache to capture")

    def encode(
        self,
        requests: Iterable[EncodeRequest],
        done: Callable[[EncodeRequest, torch.Tensor], None],
        *,
        between: Callable[[], None] = lambda: None,
        max_in_flight: int = 32,
    ) -> None:
        """Reads prompts with continuous batching.

        Args:
            requests: Read lazily.
            done: Called with ``[keep, num_layers, 2, num_kv_heads, head_dim]`` on the CPU as each
                ends.
            between: Called after each engine step; it may raise to stop.
            max_in_flight: Prompts that wait in the engine at once.
        """
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        open_requests: dict[str, EncodeRequest] = {}

        def wanted(request_id: str) -> int:
            # vLLM may append a suffix to make internal ids unique.
            found = open_requests.get(request_id) or open_requests.get(request_id.rsplit("-", 1)[0])
            return found.keep if found else 0

        self._sink.wanted = wanted
        source = iter(requests)
        exhausted = False
        params = SamplingParams(max_tokens=1, temperature=0)
        while not exhausted or open_requests:
            while not exhausted and len(open_requests) < max_in_flight:
                request = next(source, None)
                if request is None:
                    exhausted = True
                    break
                open_requests[request.name] = request
                engine.add_request(
                    request.name, {"prompt_token_ids": list(request.token_ids)}, params
                )
            if not open_requests:
                break
            engine.step()
            for request_id in list(self._sink.captured):
                kv = self._sink.captured.pop(request_id)
                name = request_id if request_id in open_requests else request_id.rsplit("-", 1)[0]
                done(open_requests.pop(name), kv)
            between()

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model so far; the others came from the prefix cache."""
        return self._sink.computed_tokens

    def close(self) -> None:
        """Frees the engine's memory."""
        self._llm.llm_engine.engine_core.shutdown()
        self._sink.pool = None
        del self._llm
