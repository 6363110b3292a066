"""The distributions that the serving engine gives at a prompt's last positions.

The engine is the real one with the real connector. A hook on the model keeps the final hidden
states of one request's prefill; the model's own output layer turns the last of them into
distributions. ``prompt_logprobs`` cannot be used: vLLM reads no KV from a connector then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from inferscale_runtime.bench.report import BenchError
from inferscale_runtime.config import RuntimeConfig
from inferscale_runtime.encode.engine import keep_engine_in_this_process


class ScoringEngine:
    """vLLM in this process, with the connector and a hook on the model.

    Args:
        llm: A running ``vllm.LLM`` of one process.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._names = count()
        self._hidden: list[torch.Tensor] = []
        self._model: Any = llm.apply_model(lambda model: model)[0]
        self._model.register_forward_hook(lambda module, args, output: self._hidden.append(output))
        self.vllm_config: Any = llm.llm_engine.vllm_config
        self.tokenizer: Any = llm.get_tokenizer()

    def score(
        self,
        token_ids: Sequence[int],
        positions: int,
        *,
        claimed: int = 0,
        salt: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """Prefills a prompt and gives what was expected at its last tokens.

        Args:
            token_ids: The prompt with the answer at its end.
            positions: Tokens of the answer.
            claimed: How many tokens ``params`` has injected.
            salt: Cache salt.
            params: ``kv_transfer_params``, or None for a text request.

        Returns:
            ``[positions, vocabulary]`` log-probabilities; row i is for answer token i.

        Raises:
            BenchError: The engine computed another number of tokens than planned.
        """
        self._hidden.clear()
        self._run(token_ids, 1, salt, params)
        hidden = torch.cat(self._hidden)
        self._hidden.clear()
        planned = len(token_ids) - claimed
        if hidden.shape[0] != planned:
            raise BenchError(
                f"{hidden.shape[0]} of {len(token_ids)} prompt tokens were computed instead of "
                f"{planned}: the injection was not used as planned"
            )
        with torch.inference_mode():
            logits = self._model.compute_logits(hidden[-positions - 1 : -1])
            result: torch.Tensor = logits.float().log_softmax(-1)
            return result

    def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        salt: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> str:
        """The greedy answer to a prompt."""
        output = self._run(token_ids, max_tokens, salt, params)
        self._hidden.clear()
        return str(output.outputs[0].text)

    def _run(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        salt: str | None,
        params: Mapping[str, Any] | None,
    ) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": dict(params)} if params else None
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, extra_args=extra)
        prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
        if salt is not None:
            prompt["cache_salt"] = salt
        return self._llm.generate([prompt], sampling, use_tqdm=False)[0]


@contextmanager
def scoring_engine(
    model: str, dtype: str, config: RuntimeConfig, max_model_len: int, kv_cache_bytes: int
) -> Iterator[ScoringEngine]:
    """Starts the engine for as long as the block runs."""
    keep_engine_in_this_process()
    from vllm import LLM
    from vllm.config import KVTransferConfig

    llm: Any = LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=max_model_len,
        distributed_executor_backend="uni",
        # Every token that is not injected is computed, so that none can come from another setting.
        enable_prefix_caching=False,
        kv_cache_memory_bytes=kv_cache_bytes,
        kv_transfer_config=KVTransferConfig(
            kv_connector="InferScaleConnector",
            kv_connector_module_path="inferscale_runtime.connector.facade",
            kv_role="kv_consumer",
            kv_connector_extra_config={"inferscale": config.model_dump(mode="json")},
        ),
    )
    try:
        yield ScoringEngine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
