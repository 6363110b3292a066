"""The class that vLLM loads: it only delegates, one object per role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from inferscale_runtime.config import RuntimeConfig
from inferscale_runtime.connector.scheduler import InjectionMetadata, SchedulerSide
from inferscale_runtime.connector.support import check_model
from inferscale_runtime.connector.worker import WorkerSide


class InferScaleConnector(KVConnectorBase_V1, SupportsHMA):
    """Injects stored KV; saves nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = RuntimeConfig.model_validate(extra["inferscale"])
        check_model(vllm_config)
        run_dir = Path(config.run_dir)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(run_dir, config.tiers.max_step_bytes)
        else:
            self._worker = WorkerSide(
                vllm_config,
                kv_cache_config,
                run_dir,
                config.inject.writer,
                config.tiers,
                kv_dtype=config.encoding.kv_dtype,
            )

    # Scheduler side.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See ``SchedulerSide``."""
        assert self._scheduler is not None
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See ``SchedulerSide``."""
        assert self._scheduler is not None
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> InjectionMetadata:
        """See ``SchedulerSide``."""
        assert self._scheduler is not None
        return self._scheduler.build_connector_meta()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Ends the request's lease; its blocks may be freed at once."""
        assert self._scheduler is not None
        self._scheduler.request_finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Same as ``request_finished`` for several KV cache groups."""
        return self.request_finished(request, block_ids)

    # Worker side.

    def shutdown(self) -> None:
        """Ends the worker's own thread."""
        if self._worker is not None:
            self._worker.stop()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Finds layers and rope; a model that cannot be injected stops the start here."""
        assert self._worker is not None
        self._worker.register_kv_caches()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Writes this step's segments before the forward."""
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, InjectionMetadata)
        self._worker.start_load(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: all loads are ordered before the forward."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved while serving."""

    def wait_for_save(self) -> None:
        """Nothing is saved while serving."""
