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
        _, hidden = self._run(token_ids, 1, claimed, salt, params)
        with torch.inference_mode():
            logits = self._model.compute_logits(hidden[-positions - 1 : -1])
            result: torch.Tensor = logits.float().log_softmax(-1)
            return result

    def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        claimed: int = 0,
        salt: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> str:
        """The greedy answer to a prompt; arguments and errors are those of ``score``.

        A claim is good for one request: the second one with the same ``params`` would go as text.
        """
        return self._run(token_ids, max_tokens, claimed, salt, params)[0]

    def _run(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        claimed: int,
        salt: str | None,
        params: Mapping[str, Any] | None,
    ) -> tuple[str, torch.Tensor]:
        """The greedy answer, and the last hidden states of all tokens that were computed."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": dict(params)} if params else None
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, extra_args=extra)
        prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
        if salt is not None:
            prompt["cache_salt"] = salt
        self._hidden.clear()
        output = self._llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
        hidden = torch.cat(self._hidden)
        self._hidden.clear()
        # The last token that was generated is not read by the model any more.
        computed = hidden.shape[0] - (len(output.token_ids) - 1)
        planned = len(token_ids) - claimed
        if computed != planned:
            raise BenchError(
                f"{computed} of {len(token_ids)} prompt tokens were computed instead of {planned}: "
                "the injection was not used as planned"
            )
        return str(output.text), hidden


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
