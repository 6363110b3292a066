"""Children of a MemoryStore: what lasts, one encoding run, and the job that erases a store."""

from __future__ import annotations

from inferscale_operator.api.memorystore import MemoryStoreSpec, Source
from inferscale_operator.desired import naming, paths, pod
from inferscale_operator.desired.account import account_name, build_account
from inferscale_operator.desired.claims import build_model_claim, build_store_claim, model_claim
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.kinds import CONFIG_MAP, JOB, Manifest
from inferscale_operator.desired.network import build_encoder_policy
from inferscale_operator.desired.quantities import encoder_resources, small_resources
from inferscale_operator.desired.runtime_config import FILE, config_text, encode_config
from inferscale_operator.desired.stores import on_one_node, store_claim, store_url
from inferscale_operator.desired.tool_source import token_ref, tool_arguments
from inferscale_runtime.budget import parse_quantity

COMPONENT = "encoder"

NAME_DIGEST_LENGTH = 8
"""Digits in names, of a digest of the whole input digest. With a store's name of 40 characters,
attempt 999 and pod 63, the host name of an Indexed Job's pod has exactly the 63 characters that
Kubernetes allows."""

ERASE_TTL_SECONDS = 300
ERASE_RETRIES = 3


def run_name(owner: naming.Owner, input_digest: str) -> str:
    """Name of a run's ConfigMap, and beginning of its Jobs' names."""
    return f"{owner['metadata']['name']}-encode-{naming.digest(input_digest, NAME_DIGEST_LENGTH)}"


def job_name(owner: naming.Owner, input_digest: str, attempt: int) -> str:
    """Name of an encoding Job."""
    return f"{run_name(owner, input_digest)}-{attempt}"


def erase_name(owner: naming.Owner) -> str:
    """Name of the erasing Job; another one for a later MemoryStore of the same name."""
    return f"{owner['metadata']['name']}-erase-{naming.digest(owner['metadata']['uid'], 8)}"


def build_encoder_base(
    owner: naming.Owner, spec: MemoryStoreSpec, defaults: Defaults
) -> list[Manifest]:
    """What a MemoryStore has as long as it exists.

    Args:
        owner: The MemoryStore.
        spec: Its spec.
        defaults: How the operator was installed.

    Returns:
        ServiceAccount, NetworkPolicy, and the claims that the spec asks for.
    """
    claims = (build_store_claim(owner, spec), build_model_claim(owner, spec.model, COMPONENT))
    return [
        build_account(owner, COMPONENT),
        build_encoder_policy(owner, defaults),
        *(claim for claim in claims if claim is not None),
    ]


def build_encode_run(
    owner: naming.Owner,
    spec: MemoryStoreSpec,
    defaults: Defaults,
    input_digest: str,
    attempt: int,
) -> list[Manifest]:
    """One run of the encoder; made once and never changed.

    Args:
        owner: The MemoryStore.
        spec: Its spec.
        defaults: How the operator was installed.
        input_digest: Digest of everything that the run is for.
        attempt: Number of the run for this input, from 0.

    Returns:
        ConfigMap (the same for every attempt) and Job.

    Raises:
        ConfigError: When a size in the spec is too small; names field, value and mend.
    """
    config = naming.child(
        CONFIG_MAP,
        owner,
        run_name(owner, input_digest),
        COMPONENT,
        {"data": {FILE: config_text(encode_config(owner["metadata"]["name"], spec))}},
        input=input_digest,
    )
    return [config, _encode_job(owner, spec, defaults, input_digest, attempt)]


def _encode_job(
    owner: naming.Owner,
    spec: MemoryStoreSpec,
    defaults: Defaults,
    input_digest: str,
    attempt: int,
) -> Manifest:
    extra = {"input": input_digest, "attempt": str(attempt)}
    labels = naming.labels(owner, COMPONENT) | {
        naming.INPUT: input_digest,
        naming.ATTEMPT: str(attempt),
    }
    mounts = _encode_mounts(owner, spec, run_name(owner, input_digest))
    container = pod.container(
        "encode",
        ["inferscale", "encode"],
        _encode_arguments(owner["metadata"]["name"], spec),
        scheduling=spec.job,
        defaults=defaults,
        body={
            "env": _encode_environment(spec),
            "ports": [pod.container_port(paths.STATUS_PORT, paths.STATUS_PORT_NUMBER)],
            "resources": encoder_resources(spec.job.resources, spec.job.kv_cache),
            "volumeMounts": mounts.mounts,
        },
    )
    pod_spec = {
        "containers": [container],
        "restartPolicy": "Never",
        "serviceAccountName": account_name(owner, COMPONENT),
        # The encoder finishes the user it is at, and a later run goes on from there.
        "terminationGracePeriodSeconds": 60,
    }
    body = {
        "spec": {
            "activeDeadlineSeconds": spec.job.timeout_seconds,
            # The operator starts failed runs again, with growing pauses and the reason in status.
            "backoffLimit": 0,
            "completionMode": "Indexed",
            "completions": spec.job.parallelism,
            "manualSelector": False,
            "parallelism": spec.job.parallelism,
            # A drained node is no failure: the pod is replaced and goes on where it was.
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    }
                ]
            },
            "podReplacementPolicy": "Failed",
            "suspend": False,
            "template": pod.pod_template(labels, {}, pod_spec, mounts, spec.job),
        }
    }
    return naming.child(
        JOB, owner, job_name(owner, input_digest, attempt), COMPONENT, body, **extra
    )


def _encode_arguments(name: str, spec: MemoryStoreSpec) -> list[str]:
    arguments = ["--config", paths.CONFIG_FILE, *pod.model_arguments(spec.model)]
    if spec.model.max_model_len is not None:
        arguments += ["--max-model-len", str(spec.model.max_model_len)]
    arguments += ["--store", pod.literal(store_url(name, spec, paths.STORE))]
    if spec.source.api is not None:
        arguments += ["--pending"]
    else:
        arguments += tool_arguments(spec.source) or ["--input", pod.literal(_input(spec.source))]
    if spec.source.http is not None and spec.source.http.authorization_secret_ref is not None:
        arguments += ["--input-authorization-file", paths.AUTHORIZATION_FILE]
    arguments += ["--shard", f"$({paths.INDEX_VARIABLE})/{spec.job.parallelism}"]
    arguments += ["--kv-cache-bytes", str(parse_quantity(spec.job.kv_cache))]
    arguments += ["--status-port", paths.PORT_REFERENCE]
    return [*arguments, "--json", paths.REPORT]


def _input(source: Source) -> str:
    if source.http is not None:
        return source.http.url
    if source.s3 is not None:
        return source.s3.url
    path = source.pvc.path if source.pvc is not None else None
    if source.config_map is not None:
        path = source.config_map.key
    return f"{paths.SOURCE}/{path}" if path else paths.SOURCE


def _encode_environment(spec: MemoryStoreSpec) -> list[Manifest]:
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        *pod.base_environment(),
        *pod.model_environment(spec.model),
        *pod.s3_environment(spec.storage.s3 or spec.source.s3),
        *pod.port_environment(paths.STATUS_PORT_NUMBER),
        {
            "name": paths.INDEX_VARIABLE,
            "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": index}},
        },
    ]


def _encode_mounts(owner: naming.Owner, spec: MemoryStoreSpec, config: str) -> pod.Mounts:
    mounts = pod.Mounts()
    mounts.add_config_map("config", paths.CONFIG, config)
    _add_store(mounts, owner, spec)
    pod.add_model_cache(mounts, spec.model, model_claim(owner, COMPONENT))
    source = spec.source
    if source.config_map is not None:
        mounts.add_config_map("source", paths.SOURCE, source.config_map.name, source.config_map.key)
    if source.pvc is not None:
        mounts.add_claim("source", paths.SOURCE, source.pvc.claim_name, read_only=True)
    ref = source.http.authorization_secret_ref if source.http is not None else None
    if ref is not None:
        mounts.add_key("source-authorization", paths.AUTHORIZATION_FILE, ref)
    token = token_ref(source)
    if token is not None:
        mounts.add_key("source-token", paths.SOURCE_TOKEN_FILE, token)
    if spec.encoding.embedder_api_key_secret_ref is not None:
        mounts.add_key(
            "embedder-key", paths.EMBEDDER_KEY_FILE, spec.encoding.embedder_api_key_secret_ref
        )
    mounts.add_empty("tmp", paths.TEMPORARY)
    return mounts


def _add_store(mounts: pod.Mounts, owner: naming.Owner, spec: MemoryStoreSpec) -> None:
    claim = store_claim(owner["metadata"]["name"], spec)
    if claim is not None:
        mounts.add_claim("store", paths.STORE, claim, one_node=on_one_node(spec))


def build_erase_job(owner: naming.Owner, spec: MemoryStoreSpec, defaults: Defaults) -> Manifest:
    """The job that erases a store's files when its MemoryStore is deleted.

    It has no owner: a foreground deletion would remove it before it ran. For the same reason it
    runs under the namespace's ``default`` account, because the encoder's own may be gone.

    Args:
        owner: The MemoryStore.
        spec: Its spec.
        defaults: How the operator was installed.
    """
    mounts = pod.Mounts()
    _add_store(mounts, owner, spec)
    mounts.add_empty("tmp", paths.TEMPORARY)
    place = store_url(owner["metadata"]["name"], spec, paths.STORE)
    container = pod.container(
        "erase",
        ["inferscale", "store"],
        ["erase", pod.literal(place), "--yes", "--json", paths.REPORT],
        scheduling=spec.job,
        defaults=defaults,
        body={
            "env": [*pod.base_environment(), *pod.s3_environment(spec.storage.s3)],
            "resources": small_resources(),
            "volumeMounts": mounts.mounts,
        },
    )
    pod_spec = {
        "containers": [container],
        "restartPolicy": "Never",
        "serviceAccountName": "default",
    }
    # Same nodes as the encoder: that is where the claim can be mounted.
    template = pod.pod_template(naming.labels(owner, COMPONENT), {}, pod_spec, mounts, spec.job)
    body = {
        "spec": {
            "activeDeadlineSeconds": defaults.erase_timeout_seconds,
            "backoffLimit": ERASE_RETRIES,
            "completionMode": "NonIndexed",
            "completions": 1,
            "manualSelector": False,
            "parallelism": 1,
            "podReplacementPolicy": "Failed",
            "suspend": False,
            "template": template,
            "ttlSecondsAfterFinished": ERASE_TTL_SECONDS,
        }
    }
    job = naming.child(JOB, owner, erase_name(owner), COMPONENT, body)
    metadata = {k: v for k, v in job["metadata"].items() if k != "ownerReferences"}
    return naming.stamp({**job, "metadata": metadata})
