"""One generation of servers: its settings and its Deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferscale_operator.api.base import SecretKeyRef
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired import naming, paths, pod
from inferscale_operator.desired.account import account_name
from inferscale_operator.desired.availability import spread_constraints
from inferscale_operator.desired.claims import model_claim
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.kinds import CONFIG_MAP, DEPLOYMENT, Manifest
from inferscale_operator.desired.plan_map import PLAN_KEY, plan_name
from inferscale_operator.desired.quantities import format_bytes, server_resources, shm_bytes
from inferscale_operator.desired.runtime_config import FILE, config_text, serve_config
from inferscale_operator.desired.secret import API_KEY
from inferscale_operator.desired.selection import (
    COMPONENT,
    deployment_name,
    generation_selector,
)
from inferscale_operator.desired.stores import (
    StoreView,
    on_one_node,
    remote_embedders,
    store_claim,
)
from inferscale_operator.desired.tracing import tracing_arguments, tracing_environment

PRE_STOP_SECONDS = 10
"""How long a stopping server still takes requests: endpoints are updated meanwhile."""
GRACE_MARGIN_SECONDS = 20
"""What a server needs beside that and its shutdown timeout to end in order."""
PROBE_SECONDS = 5
LEAST_PROGRESS_SECONDS = 600
PROGRESS_MARGIN_SECONDS = 60


@dataclass(frozen=True, slots=True)
class GpuShare:
    """How the memory of each GPU is divided.

    Attributes:
        arena_bytes: Arena of hot KV; 0 for none.
        utilization: vLLM's share of the GPU; None leaves it to vLLM or the spec.
    """

    arena_bytes: int = 0
    utilization: float | None = None


NO_SHARE = GpuShare()


def server_generation(spec: PersonalizedModelSpec, stores: Sequence[StoreView]) -> str:
    """Digest of what makes a generation of its own; anything else is a rolling update in place.

    Args:
        spec: Of the PersonalizedModel.
        stores: Its stores; their order does not matter here.
    """
    return naming.digest(
        {
            "model": spec.model.id,
            "revision": spec.model.revision,
            "dtype": spec.model.dtype,
            "engineArgs": spec.serving.engine_args,
            "stores": sorted([store.name, store.fingerprint] for store in stores),
        }
    )


def build_generation(
    owner: naming.Owner,
    spec: PersonalizedModelSpec,
    stores: Sequence[StoreView],
    defaults: Defaults,
    generation: str,
    api_key_secret: str | None,
    gpu: GpuShare = NO_SHARE,
) -> list[Manifest]:
    """The children of one generation.

    Args:
        owner: The PersonalizedModel.
        spec: Its spec.
        stores: Its stores in the order of the spec, at least one.
        defaults: How the operator was installed.
        generation: From ``server_generation``.
        api_key_secret: Secret with the key ``api-key``; None when there is no single key.
        gpu: Division of GPU memory.

    Returns:
        ConfigMap and Deployment. The ConfigMap's name holds a digest of its content, and the pods
        name it, so that changed settings are a rolling update.

    Raises:
        ConfigError: When a size in the spec is too small; names field, value and mend.
    """
    text = config_text(serve_config(spec, stores, gpu.arena_bytes))
    mark = naming.digest([generation, text])
    config = naming.child(
        CONFIG_MAP,
        owner,
        f"{owner['metadata']['name']}-config-{mark}",
        COMPONENT,
        {"data": {FILE: text}, "immutable": True},
        generation=generation,
    )
    mounts = _mounts(owner, spec, stores, config["metadata"]["name"], api_key_secret)
    arguments = _arguments(owner, spec, gpu)
    container = _container(owner, arguments, spec, stores, defaults, mounts)
    pod_spec: Manifest = {
        "containers": [container],
        "restartPolicy": "Always",
        "serviceAccountName": account_name(owner, COMPONENT),
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS
        + spec.serving.shutdown_timeout_seconds
        + GRACE_MARGIN_SECONDS,
    }
    constraints = spread_constraints(owner, spec, generation)
    # Pods that share a disk are on one node anyway.
    if constraints and not mounts.one_node_claims:
        pod_spec["topologySpreadConstraints"] = constraints
    template = pod.pod_template(
        naming.labels(owner, COMPONENT) | {naming.GENERATION: generation},
        {},
        pod_spec,
        mounts,
        spec.serving,
    )
    return [config, _deployment(owner, spec, generation, template)]


def _deployment(
    owner: naming.Owner, spec: PersonalizedModelSpec, generation: str, template: Manifest
) -> Manifest:
    start = spec.serving.startup_timeout_seconds
    body = {
        # Only the Progressing condition depends on it; it must not say failed before the probes do.
        "progressDeadlineSeconds": max(LEAST_PROGRESS_SECONDS, start + PROGRESS_MARGIN_SECONDS),
        "replicas": spec.serving.replicas,
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": generation_selector(owner, generation)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": template,
    }
    return naming.child(
        DEPLOYMENT,
        owner,
        deployment_name(owner, generation),
        COMPONENT,
        {"spec": body},
        generation=generation,
    )


def _container(
    owner: naming.Owner,
    arguments: Sequence[str],
    spec: PersonalizedModelSpec,
    stores: Sequence[StoreView],
    defaults: Defaults,
    mounts: pod.Mounts,
) -> Manifest:
    serving = spec.serving
    return pod.container(
        "serve",
        ["inferscale", "serve"],
        arguments,
        scheduling=serving,
        defaults=defaults,
        body={
            "env": _environment(owner, spec, stores),
            "ports": [pod.container_port(paths.HTTP_PORT, paths.HTTP_PORT_NUMBER)],
            "resources": server_resources(
                serving.resources, serving.tensor_parallel_size, spec.tiers.dram
            ),
            "volumeMounts": mounts.mounts,
            "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
            "startupProbe": _probe(
                "/health", failures=-(-serving.startup_timeout_seconds // PROBE_SECONDS), timeout=5
            ),
            "readinessProbe": _probe("/inferscale/v1/ready", failures=3, timeout=5),
            # A busy engine answers late; a dead one never.
            "livenessProbe": _probe("/health", failures=12, timeout=10),
        },
    )


def _arguments(owner: naming.Owner, spec: PersonalizedModelSpec, gpu: GpuShare) -> list[str]:
    serving = spec.serving
    share = gpu.utilization
    length = spec.model.max_model_len
    return [
        "--config",
        paths.CONFIG_FILE,
        *pod.model_arguments(spec.model),
        "--host",
        "0.0.0.0",
        "--port",
        paths.PORT_REFERENCE,
        "--served-model-name",
        owner["metadata"]["name"],
        "--",
        "--tensor-parallel-size",
        str(serving.tensor_parallel_size),
        *(["--max-model-len", str(length)] if length is not None else []),
        *(["--gpu-memory-utilization", f"{share:.4f}"] if share is not None else []),
        "--shutdown-timeout",
        str(serving.shutdown_timeout_seconds),
        *tracing_arguments(spec.observability.tracing),
        *(pod.literal(argument) for argument in serving.engine_args),
    ]


def _environment(
    owner: naming.Owner, spec: PersonalizedModelSpec, stores: Sequence[StoreView]
) -> list[Manifest]:
    place = next((s.spec.storage.s3 for s in stores if s.spec.storage.s3 is not None), None)
    return [
        *pod.base_environment(),
        *pod.model_environment(spec.model),
        *pod.s3_environment(place),
        *pod.port_environment(paths.HTTP_PORT_NUMBER),
        *tracing_environment(owner, spec.observability.tracing),
    ]


def _mounts(
    owner: naming.Owner,
    spec: PersonalizedModelSpec,
    stores: Sequence[StoreView],
    config: str,
    api_key_secret: str | None,
) -> pod.Mounts:
    mounts = pod.Mounts()
    mounts.add_config_map("config", paths.CONFIG, config)
    mounts.add_config_map("plan", paths.PLAN, plan_name(owner), PLAN_KEY, optional=True)
    for store in stores:
        claim = store_claim(store.name, store.spec)
        if claim is not None:
            path = f"{paths.SERVER_STORES}/{store.name}"
            one_node = on_one_node(store.spec)
            # Facts that come through the memory API are written by the server.
            fixed = store.spec.source.api is None
            mounts.add_claim(f"store-{store.name}", path, claim, read_only=fixed, one_node=one_node)
    pod.add_model_cache(mounts, spec.model, model_claim(owner, COMPONENT))
    for store in remote_embedders(stores)[:1]:
        ref = store.spec.encoding.embedder_api_key_secret_ref
        if ref is not None:
            mounts.add_key("embedder-key", paths.EMBEDDER_KEY_FILE, ref)
    _add_credentials(mounts, spec, api_key_secret)
    size = format_bytes(shm_bytes(spec.tiers.dram))
    mounts.add("shm", paths.SHARED_MEMORY, {"emptyDir": {"medium": "Memory", "sizeLimit": size}})
    mounts.add_empty("tmp", paths.TEMPORARY)
    return mounts


def _add_credentials(
    mounts: pod.Mounts, spec: PersonalizedModelSpec, api_key_secret: str | None
) -> None:
    """Mounts what callers are checked against; servers follow it without a restart."""
    keys = spec.auth.keys_secret_ref
    if api_key_secret is not None:
        keys = SecretKeyRef(name=api_key_secret, key=API_KEY)
    if keys is not None:
        mounts.add_key("auth-keys", paths.AUTH_KEYS_FILE, keys)
    if spec.auth.jwt is not None and spec.auth.jwt.jwks_secret_ref is not None:
        mounts.add_key("auth-jwks", paths.JWKS_FILE, spec.auth.jwt.jwks_secret_ref)


def _probe(path: str, *, failures: int, timeout: int) -> Manifest:
    return {
        "failureThreshold": failures,
        "httpGet": {"path": path, "port": paths.HTTP_PORT, "scheme": "HTTP"},
        "periodSeconds": PROBE_SECONDS,
        "successThreshold": 1,
        "timeoutSeconds": timeout,
    }
