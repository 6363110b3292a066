"""Good manifests of both kinds: with what is required only, and with every field."""

from __future__ import annotations

import copy
from typing import Any

from inferscale_operator.api.base import API_VERSION

Manifest = dict[str, Any]
DELETE = object()


def store(name: str = "s", **spec: Any) -> Manifest:
    """A MemoryStore with what is required only, changed by ``spec``."""
    least = {"model": {"id": "org/model"}, "source": {"configMap": {"name": "facts"}}}
    return _manifest("MemoryStore", name, merged(least, spec))


def model(name: str = "m", **spec: Any) -> Manifest:
    """A PersonalizedModel with what is required only, changed by ``spec``."""
    least = {"model": {"id": "org/model"}, "memoryStores": [{"name": "s"}]}
    return _manifest("PersonalizedModel", name, merged(least, spec))


def _manifest(kind: str, name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def merged(value: Manifest, patch: Manifest) -> Manifest:
    """A JSON merge patch; ``DELETE`` removes a field."""
    result = copy.deepcopy(value)
    for key, part in patch.items():
        if part is DELETE:
            result.pop(key, None)
        elif isinstance(part, dict):
            old = result.get(key)
            result[key] = merged(old if isinstance(old, dict) else {}, part)
        else:
            result[key] = part
    return result


KEY = {"name": "secret", "key": "token"}
_TOOL: Manifest = {"tokenSecretRef": KEY, "allowEmpty": True}
S3 = {"url": "s3://bucket/a", "endpointUrl": "https://minio:9000", "region": "eu-west-1"}
_SCHEDULING: Manifest = {
    "image": "registry.example/inferscale:1",
    "imagePullPolicy": "Always",
    "imagePullSecrets": [{"name": "pull"}],
    "resources": {"requests": {"cpu": "500m", "memory": "4Gi"}, "limits": {"memory": "8Gi"}},
    "nodeSelector": {"example.com/gpu-type": "h200"},
    "tolerations": [
        {
            "key": "nvidia.com/gpu",
            "operator": "Equal",
            "value": "yes",
            "effect": "NoExecute",
            "tolerationSeconds": 60,
        }
    ],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
}
_MODEL: Manifest = {
    "id": "org/model",
    "revision": "main",
    "dtype": "bfloat16",
    "maxModelLen": 8192,
    "tokenSecretRef": KEY,
    "cache": {"size": "20Gi", "storageClassName": "fast"},
}
_OWN_WEIGHTS: Manifest = {
    "id": "/models/x",
    "revision": DELETE,
    "cache": {"claimName": "weights", "size": DELETE, "storageClassName": DELETE},
}
_STORE: Manifest = store(
    model=_MODEL,
    prompt={"heading": "Known:\n", "factFormat": "* {text}\n", "footer": "\n"},
    encoding={
        "policy": "turns:20",
        "kvDtype": "int8",
        "embedder": "openai:m@https://e/v1",
        "embedderApiKeySecretRef": KEY,
    },
    source={"configMap": {"name": "facts", "key": "a.jsonl"}},
    storage={"pvc": {"size": "1Gi", "storageClassName": "fast", "accessMode": "ReadWriteMany"}},
    placement={"tier": "DRAM", "priority": 10, "floor": "512Mi"},
    quota={"maxBytes": "1Gi", "maxFactsPerUser": 100},
    retention={"maxAgeDays": 30, "onDelete": "Retain"},
    job={
        **_SCHEDULING,
        "parallelism": 2,
        "kvCache": "2Gi",
        "backoffLimit": 1,
        "timeoutSeconds": 600,
    },
    suspend=True,
)
FULL = (
    model(model=_OWN_WEIGHTS),
    _STORE,
    merged(
        _STORE,
        {
            "spec": {
                "model": _OWN_WEIGHTS,
                "source": {
                    "configMap": DELETE,
                    "pvc": {"claimName": "input", "path": "in"},
                    "refresh": "0 3 * * 1-5",
                },
                "storage": {"pvc": {"claimName": "own", "storageClassName": DELETE}},
            }
        },
    ),
    merged(
        _STORE,
        {
            "spec": {
                "source": {
                    "configMap": DELETE,
                    "http": {"url": "https://h/f.jsonl", "authorizationSecretRef": KEY},
                }
            }
        },
    ),
    *(
        merged(_STORE, {"spec": {"source": {"configMap": DELETE, name: source}}})
        for name, source in (
            ("mem0", {"url": "https://h", "api": "platform", "turns": True, **_TOOL}),
            ("zep", {"url": "https://h/zep", "turns": True, **_TOOL}),
            ("letta", {"url": "http://h", "usersFrom": "tag:u:", "blocks": ["human"], **_TOOL}),
        )
    ),
    merged(
        _STORE,
        {
            "spec": {
                "source": {
                    "configMap": DELETE,
                    "api": {"pendingSeconds": 60, "pendingFacts": 10},
                }
            }
        },
    ),
    merged(
        _STORE,
        {
            "spec": {
                "source": {
                    "configMap": DELETE,
                    "s3": {**S3, "credentialsSecretRef": {"name": "s3"}},
                },
                "storage": {
                    "pvc": DELETE,
                    "s3": {**S3, "url": "s3://bucket/b", "credentialsSecretRef": {"name": "s3"}},
                },
            }
        },
    ),
    model(
        model=_MODEL,
        memoryStores=[{"name": "a"}, {"name": "b"}],
        retrieval={
            "topK": 50,
            "linkTail": 5,
            "minScore": 0.25,
            "order": "stored",
            "unknownUser": "error",
        },
        tiers={
            "gpu": {"budget": "auto", "headroomPercent": 10},
            "dram": "8Gi",
            "stageTimeoutMs": 100,
        },
        serving={
            **_SCHEDULING,
            "resources": {"requests": {"cpu": 4}, "limits": {"nvidia.com/gpu": 2}},
            "replicas": 3,
            "tensorParallelSize": 2,
            "engineArgs": ["--enforce-eager", "--max-num-seqs=64"],
            "shutdownTimeoutSeconds": 30,
            "startupTimeoutSeconds": 600,
            "spread": "Zone",
        },
        autoscaling={
            "provider": "keda",
            "minReplicas": 0,
            "maxReplicas": 9,
            "target": {"requests": 4, "kvCachePercent": 80, "ttftP95Ms": 2000},
            "behavior": {"upSeconds": 10, "downSeconds": 120, "tolerancePercent": 5},
            "scaleToZero": {"idleSeconds": 300, "maxHeldRequests": 50, "maxWaitSeconds": 120},
            "prometheusAddress": "http://prometheus:9090",
        },
        auth={
            "mode": "apiKey",
            "secretRef": {"name": "key"},
            "limits": {"keyRequestsPerMinute": 600, "userRequestsPerMinute": 60, "burst": 5},
            "audit": "Log",
        },
        canary={
            "sample": 0.05,
            "startSamples": 5,
            "klLimit": 0.25,
            "top1Limit": 0.8,
            "window": 50,
            "recheckSeconds": 60,
        },
        disruption={"maxUnavailable": 2},
        network={"enabled": True, "namespaces": ["web"]},
        routing={
            **_SCHEDULING,
            "provider": "vllm-router",
            "policy": "stickyLeastLoaded",
            "replicas": 1,
        },
        observability={
            "tracing": {"endpoint": "https://c:4317", "protocol": "grpc", "sampleRatio": 0.5}
        },
    ),
    model("keys", auth={"mode": "apiKey", "keysSecretRef": KEY}),
    model(
        "jwt",
        auth={
            "mode": "jwt",
            "jwt": {
                "jwksUri": "https://issuer.example/keys",
                "issuer": "https://issuer.example",
                "audience": ["inferscale"],
                "algorithms": ["EdDSA"],
                "userClaim": "uid",
                "scopeClaim": "scope",
                "leewaySeconds": 5,
            },
        },
    ),
    model(
        "jwks",
        auth={
            "mode": "jwt",
            "jwt": {"jwksSecretRef": KEY, "issuer": "https://i", "audience": ["a"]},
        },
    ),
)
"""Good manifests that together have every field of both kinds."""
