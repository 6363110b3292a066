"""The KV connector: scheduler side and worker side share nothing but per-step metadata."""

CONNECTOR_NAME = "InferScaleConnector"


def register() -> None:
    """Entry point of ``vllm.general_plugins``; called in every vLLM process, maybe repeatedly."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR_NAME, "inferscale_runtime.connector.facade", CONNECTOR_NAME
        )
