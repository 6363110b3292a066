"""What is wrong with manifests, rule by rule; for the models and for a real API server."""

from __future__ import annotations

from typing import Any

from tests.unit.operator.api.bounds import Case
from tests.unit.operator.api.manifests import DELETE, KEY, S3, Manifest, model, store


def _bad(manifest: Manifest, path: str, words: str) -> Case:
    return Case(f"{manifest['kind']} {path} {words}", manifest, path, words)


_GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}, "tensorParallelSize": 2}
_KEDA = {"provider": "keda"}


def _tolerating(**toleration: Any) -> Manifest:
    return model(serving={"tolerations": [toleration]})


RULE_CASES = (
    _bad(store("a" * 41), "", "metadata.name must have at most 40 characters"),
    _bad(model("a" * 41), "", "metadata.name must have at most 40 characters"),
    _bad(store("a.b"), "metadata", "name"),
    _bad(model("1a"), "metadata", "name"),
    _bad(store(source=DELETE), "spec.source", ""),
    _bad(store(model=DELETE), "spec.model", ""),
    _bad(model(memoryStores=DELETE), "spec.memoryStores", ""),
    _bad(store(model={"id": "a/../b"}), "spec.model.id", "must not contain '..'"),
    _bad(
        store(model={"id": "builtin:smollm2-135m", "revision": "main"}),
        "spec.model",
        "revision is for hub ids",
    ),
    _bad(model(model={"id": "/opt/m", "revision": "x"}), "spec.model", "revision is for hub ids"),
    _bad(store(model={"id": "/models/x"}), "spec.model", "set cache.claimName"),
    _bad(
        store(model={"cache": {"claimName": "a", "size": "1Gi"}}),
        "spec.model.cache",
        "not both",
    ),
    _bad(
        store(model={"cache": {"storageClassName": "a"}}),
        "spec.model.cache",
        "storageClassName is for a claim made by the operator",
    ),
    _bad(store(model={"cache": {"size": 5}}), "spec.model.cache.size", "at least 1Mi"),
    _bad(
        store(encoding={"embedderApiKeySecretRef": KEY}),
        "spec.encoding",
        "embedderApiKeySecretRef is for an 'openai:' embedder",
    ),
    _bad(
        store(source={"configMap": DELETE}),
        "spec.source",
        "set exactly one of configMap, pvc, http, s3, mem0, zep, letta",
    ),
    _bad(
        store(source={"pvc": {"claimName": "a"}}),
        "spec.source",
        "set exactly one of configMap, pvc, http, s3, mem0, zep, letta",
    ),
    _bad(
        store(source={"refresh": "0 3 * * *"}),
        "spec.source",
        "a ConfigMap is watched",
    ),
    _bad(
        store(source={"zep": {}}),
        "spec.source",
        "set exactly one of configMap, pvc, http, s3, mem0, zep, letta",
    ),
    _bad(
        store(source={"configMap": DELETE, "mem0": {"url": "http://h", "turns": True}}),
        "spec.source.mem0",
        "turns is for api platform",
    ),
    _bad(
        store(source={"configMap": DELETE, "pvc": {"claimName": "a", "path": "a/../b"}}),
        "spec.source.pvc.path",
        "must not contain '..'",
    ),
    _bad(store(storage={}), "spec.storage", "set exactly one of pvc and s3"),
    _bad(store(storage={"pvc": {}, "s3": S3}), "spec.storage", "set exactly one of pvc and s3"),
    _bad(
        store(storage={"pvc": {"claimName": "a", "storageClassName": "b"}}),
        "spec.storage.pvc",
        "storageClassName is for a claim made by the operator",
    ),
    _bad(store(storage={"pvc": {"size": "10"}}), "spec.storage.pvc.size", "at least 1Mi"),
    _bad(
        store(
            source={"configMap": DELETE, "s3": S3},
            storage={"s3": {"url": "s3://bucket/b"}},
        ),
        "spec",
        "must have the same endpointUrl, region and credentialsSecretRef",
    ),
    _bad(
        store(
            source={"configMap": DELETE, "s3": {**S3, "credentialsSecretRef": {"name": "a"}}},
            storage={"s3": {**S3, "credentialsSecretRef": {"name": "b"}}},
        ),
        "spec",
        "must have the same endpointUrl, region and credentialsSecretRef",
    ),
    _bad(store(quota={"maxBytes": "100Ki"}), "spec.quota.maxBytes", "at least 1Mi"),
    _bad(store(placement={"floor": 5}), "spec.placement.floor", "at least 1Mi"),
    _bad(
        model(tiers={"gpu": {"budget": "4Ki"}}),
        "spec.tiers.gpu.budget",
        "must be auto or at least 1Mi",
    ),
    _bad(store(job={"kvCache": "1Mi"}), "spec.job.kvCache", "at least 64Mi"),
    _bad(
        store(job={"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1G"}}}),
        "spec.job.resources",
        "requests must not be above limits",
    ),
    _bad(_tolerating(value="x"), "spec.serving.tolerations[0]", "without key, operator must be"),
    _bad(
        _tolerating(key="a", operator="Exists", value="x"),
        "spec.serving.tolerations[0]",
        "value is for operator Equal",
    ),
    _bad(
        _tolerating(key="a", effect="NoSchedule", tolerationSeconds=5),
        "spec.serving.tolerations[0]",
        "tolerationSeconds is for effect NoExecute",
    ),
    _bad(model(memoryStores=[{"name": "a"}, {"name": "a"}]), "spec.memoryStores", ""),
    _bad(model(retrieval={"topK": 3, "linkTail": 4}), "spec.retrieval", "linkTail must not be"),
    _bad(model(tiers={"dram": 1024}), "spec.tiers.dram", "at least 1Mi"),
    *(
        _bad(model(serving={"engineArgs": [argument]}), "spec.serving.engineArgs", words)
        for argument, words in (
            ("--model", "has a field of its own"),
            ("--api-key=secret", "has a field of its own"),
            ("--tensor_parallel_size=2", "has a field of its own"),
            ("-tp", "has a field of its own"),
            ("--kv-transfer-config.kv_role", "has a field of its own"),
            ("--enable-lora", "injection or the pod's port"),
            ("--speculative-config.method", "injection or the pod's port"),
        )
    ),
    _bad(model(serving=_GPU), "spec.serving", "must hold at least tensorParallelSize GPUs"),
    _bad(
        model(autoscaling={"minReplicas": 5}),
        "spec.autoscaling",
        "minReplicas must not be above maxReplicas",
    ),
    _bad(
        model(autoscaling={"provider": "operator", "minReplicas": 0}),
        "spec.autoscaling",
        "minReplicas 0 needs scaleToZero",
    ),
    _bad(
        model(routing={"provider": "vllm-router", "policy": "stickyLeastLoaded"}),
        "spec.routing",
        "needs replicas 1",
    ),
    _bad(model(autoscaling=_KEDA), "spec.autoscaling", "provider keda needs prometheusAddress"),
    _bad(model(auth={"secretRef": {"name": "a"}}), "spec.auth", "secretRef is for mode apiKey"),
    _bad(
        model(auth={"keysSecretRef": {"name": "a", "key": "b"}}),
        "spec.auth",
        "keysSecretRef is for mode apiKey",
    ),
    _bad(
        model(
            auth={
                "mode": "apiKey",
                "secretRef": {"name": "a"},
                "keysSecretRef": {"name": "a", "key": "b"},
            }
        ),
        "spec.auth",
        "not both",
    ),
    _bad(model(auth={"mode": "jwt"}), "spec.auth", "jwt belongs to mode jwt"),
    _bad(
        model(auth={"mode": "jwt", "jwt": {"issuer": "i", "audience": ["a"]}}),
        "spec.auth.jwt",
        "set jwksUri or jwksSecretRef",
    ),
)
"""At least one manifest for each rule that does not compare with an old object."""

CHANGES: tuple[tuple[str, Manifest, Manifest, str], ...] = (
    ("pvc to s3", {}, {"storage": {"pvc": DELETE, "s3": S3}}, "place of a store cannot be changed"),
    (
        "s3 to pvc",
        {"storage": {"s3": S3}},
        {"storage": {"s3": DELETE, "pvc": {}}},
        "place of a store cannot be changed",
    ),
    (
        "another bucket",
        {"storage": {"s3": S3}},
        {"storage": {"s3": {"url": "s3://other"}}},
        "place of a store cannot be changed",
    ),
    (
        "another endpoint",
        {"storage": {"s3": S3}},
        {"storage": {"s3": {"endpointUrl": DELETE}}},
        "place of a store cannot be changed",
    ),
    (
        "another claim",
        {"storage": {"pvc": {"claimName": "a"}}},
        {"storage": {"pvc": {"claimName": "b"}}},
        "place of a store cannot be changed",
    ),
    (
        "own claim to an existing one",
        {},
        {"storage": {"pvc": {"claimName": "b"}}},
        "place of a store cannot be changed",
    ),
    (
        "another access mode",
        {},
        {"storage": {"pvc": {"accessMode": "ReadWriteMany"}}},
        "storageClassName and accessMode cannot be changed",
    ),
    (
        "a storage class",
        {},
        {"storage": {"pvc": {"storageClassName": "b"}}},
        "storageClassName and accessMode cannot be changed",
    ),
    (
        "a smaller volume",
        {"storage": {"pvc": {"size": "10Gi"}}},
        {"storage": {"pvc": {"size": "9.5Gi"}}},
        "a volume cannot shrink",
    ),
)
"""(what, spec of a stored MemoryStore, merge patch of its spec, refusal)."""

ALLOWED_CHANGES: tuple[tuple[str, Manifest], ...] = (
    ("a larger volume", {"storage": {"pvc": {"size": "20Gi"}}}),
    ("the same size in other words", {"storage": {"pvc": {"size": "10240Mi"}}}),
    ("another model", {"model": {"id": "org/other", "revision": "v2", "dtype": "float32"}}),
    ("another source", {"source": {"configMap": DELETE, "http": {"url": "http://h/f"}}}),
    ("another prompt", {"prompt": {"heading": "Known:\n"}}),
)
"""(what, merge patch of the spec of a minimal MemoryStore)."""
