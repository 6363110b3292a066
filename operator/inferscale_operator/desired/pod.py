"""Parts that the pods of jobs and servers share.

Every pod fits the ``restricted`` Pod Security Standard. Defaults of the API are written out, and
what the API server leaves out when it is empty is left out here too: what is applied equals what is
read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inferscale_operator.api.base import GROUP, Model, Scheduling, SecretKeyRef
from inferscale_operator.api.memorystore import S3Location
from inferscale_operator.desired import paths
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.kinds import Manifest

USER_ID = 1000
"""User and group of every process; the images have it."""

READABLE_MODE = 0o444
"""Mode of mounted settings and facts."""
SECRET_MODE = 0o440
"""Mode of mounted secrets: the files belong to root and the pod's group."""

S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


VOLUME_LABEL_PREFIX = f"volume.{GROUP}/"
"""Label of pods that mount a claim which one node at a time can mount; the claim's name follows."""


@dataclass(slots=True)
class Mounts:
    """Volumes and mounts under construction; a volume and its mount are added together.

    Attributes:
        volumes: Of the pod.
        mounts: Of its container.
        one_node_claims: Claims that only one node at a time can mount.
    """

    volumes: list[Manifest] = field(default_factory=list)
    mounts: list[Manifest] = field(default_factory=list)
    one_node_claims: list[str] = field(default_factory=list)

    def add(self, name: str, path: str, source: Manifest, *, read_only: bool = False) -> None:
        """Adds a volume and mounts it."""
        self.volumes.append({"name": name, **source})
        mount: Manifest = {"name": name, "mountPath": path}
        # A claim is mounted read-only here and not in the volume: some drivers refuse to attach
        # one disk to a node both ways.
        self.mounts.append(mount | {"readOnly": True} if read_only else mount)

    def add_claim(
        self,
        name: str,
        path: str,
        claim: str,
        *,
        read_only: bool = False,
        one_node: bool = False,
    ) -> None:
        """Adds a PersistentVolumeClaim; ``one_node`` tells that it is ReadWriteOnce."""
        source = {"persistentVolumeClaim": {"claimName": claim}}
        self.add(name, path, source, read_only=read_only)
        if one_node:
            self.one_node_claims.append(claim)

    def add_config_map(
        self,
        name: str,
        path: str,
        config_map: str,
        key: str | None = None,
        *,
        optional: bool = False,
    ) -> None:
        """Adds a ConfigMap, or one key of it; an optional one may be missing or come later."""
        source: Manifest = {"name": config_map, "defaultMode": READABLE_MODE}
        if key is not None:
            source["items"] = [{"key": key, "path": key}]
        if optional:
            source["optional"] = True
        self.add(name, path, {"configMap": source}, read_only=True)

    def add_key(self, name: str, file: str, ref: SecretKeyRef) -> None:
        """Adds one key of a Secret as a file, alone in its folder."""
        folder, _, base = file.rpartition("/")
        source = {
            "secretName": ref.name,
            "defaultMode": SECRET_MODE,
            "items": [{"key": ref.key, "path": base}],
        }
        self.add(name, folder, {"secret": source}, read_only=True)

    def add_empty(self, name: str, path: str) -> None:
        """Adds a folder that lives as long as the pod."""
        self.add(name, path, {"emptyDir": {}})


def add_model_cache(mounts: Mounts, model: Model, own_claim: str) -> None:
    """Mounts the folder of model weights: the named claim, the owner's own, or the pod's.

    Args:
        mounts: To add to.
        model: Of the spec.
        own_claim: Name of the claim that is made when the spec gives a size.
    """
    claim = model.cache.claim_name or (own_claim if model.cache.size else None)
    if claim is None:
        mounts.add_empty("models", paths.MODELS)
    else:
        # The scheduler heeds only pods that match every term, and encoder and servers share the
        # store but not this claim: the store alone decides where there is one.
        one_node = model.cache.claim_name is None and not mounts.one_node_claims
        mounts.add_claim("models", paths.MODELS, claim, one_node=one_node)


def secret_variable(name: str, secret: str, key: str) -> Manifest:
    """An environment variable from a Secret."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def base_environment() -> list[Manifest]:
    """Variables of every pod: the only writable folders are ``/tmp`` and the mounts.

    ``USER`` is for libraries that ask for the user's name where the image has none for the id.
    """
    return [{"name": "HOME", "value": paths.TEMPORARY}, {"name": "USER", "value": "inferscale"}]


def model_environment(model: Model) -> list[Manifest]:
    """Where weights are kept, and the hub token."""
    variables: list[Manifest] = [
        {"name": "HF_HOME", "value": paths.HUB},
        {"name": "INFERSCALE_MODEL_CACHE", "value": paths.BUILTIN_MODELS},
    ]
    if model.token_secret_ref is not None:
        ref = model.token_secret_ref
        variables.append(secret_variable("HF_TOKEN", ref.name, ref.key))
    return variables


def s3_environment(place: S3Location | None) -> list[Manifest]:
    """Endpoint, region and credentials of object storage.

    A pod has one set; ``stores.s3_conflict`` tells when two places do not agree.
    """
    if place is None:
        return []
    variables: list[Manifest] = []
    if place.endpoint_url is not None:
        variables.append({"name": "AWS_ENDPOINT_URL", "value": place.endpoint_url})
    if place.region is not None:
        # botocore reads only the second, other clients the first.
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
            variables.append({"name": name, "value": place.region})
    if place.credentials_secret_ref is not None:
        secret = place.credentials_secret_ref.name
        variables.extend(secret_variable(key, secret, key) for key in S3_KEYS)
    return variables


def port_environment(port: int) -> list[Manifest]:
    """The port as a variable, for arguments."""
    return [{"name": paths.PORT_VARIABLE, "value": str(port)}]


def literal(text: str) -> str:
    """A user's text as an argument: Kubernetes expands ``$(NAME)``, and ``$$`` is a dollar sign."""
    return text.replace("$", "$$")


def model_arguments(model: Model) -> list[str]:
    """``--model``, ``--revision`` and ``--dtype``."""
    revision = ["--revision", literal(model.revision)] if model.revision else []
    return ["--model", literal(model.id), *revision, "--dtype", model.dtype]


def container_port(name: str, number: int) -> Manifest:
    """A port of a container."""
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def container(
    name: str,
    command: Sequence[str],
    arguments: Sequence[str],
    *,
    scheduling: Scheduling,
    defaults: Defaults,
    body: Manifest,
) -> Manifest:
    """A container that fits the restricted standard.

    Args:
        name: Its name.
        command: Program and subcommand.
        arguments: The rest.
        scheduling: Image and pull policy.
        defaults: The image where the spec names none.
        body: ``env``, ``ports``, ``resources``, ``volumeMounts``, probes.
    """
    return {
        "name": name,
        "image": scheduling.image or defaults.runtime_image,
        "imagePullPolicy": scheduling.image_pull_policy,
        "command": list(command),
        "args": list(arguments),
        "terminationMessagePath": paths.REPORT,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
        },
        **body,
    }


def pod_template(
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    spec: Manifest,
    mounts: Mounts,
    scheduling: Scheduling,
) -> Manifest:
    """A pod template.

    Args:
        labels: Of the pods.
        annotations: Of the pods; may be empty.
        spec: What differs between pods: containers, restart policy, service account.
        mounts: Their volumes.
        scheduling: Node selection and pull secrets.
    """
    shared = {f"{VOLUME_LABEL_PREFIX}{claim}": "mounted" for claim in mounts.one_node_claims}
    metadata: Manifest = {"labels": {**labels, **shared}}
    if annotations:
        metadata["annotations"] = dict(annotations)
    placement = _placement(scheduling)
    if shared:
        placement["affinity"] = _same_node(sorted(shared))
    return {
        "metadata": metadata,
        "spec": _pod_defaults() | placement | spec | {"volumes": mounts.volumes},
    }


def _same_node(labels: list[str]) -> Manifest:
    """Pods that share a claim run on the node that has it; the first one runs anywhere.

    Elsewhere they would wait for the volume for ever, and nobody would see why: the scheduler does
    not know where a ReadWriteOnce disk is attached.
    """
    terms = [
        {
            "labelSelector": {"matchExpressions": [{"key": label, "operator": "Exists"}]},
            "topologyKey": "kubernetes.io/hostname",
        }
        for label in labels
    ]
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _pod_defaults() -> Manifest:
    return {
        "automountServiceAccountToken": False,
        "dnsPolicy": "ClusterFirst",
        "enableServiceLinks": False,
        "schedulerName": "default-scheduler",
        "securityContext": {
            "fsGroup": USER_ID,
            # A store of many files would be walked at each start otherwise.
            "fsGroupChangePolicy": "OnRootMismatch",
            "runAsGroup": USER_ID,
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": 30,
    }


def _placement(scheduling: Scheduling) -> Manifest:
    placement: Manifest = {}
    if scheduling.image_pull_secrets:
        placement["imagePullSecrets"] = [
            {"name": secret.name} for secret in scheduling.image_pull_secrets
        ]
    if scheduling.node_selector:
        placement["nodeSelector"] = dict(scheduling.node_selector)
    if scheduling.tolerations:
        placement["tolerations"] = [
            toleration.model_dump(by_alias=True, exclude_none=True)
            for toleration in scheduling.tolerations
        ]
    if scheduling.priority_class_name is not None:
        placement["priorityClassName"] = scheduling.priority_class_name
    if scheduling.runtime_class_name is not None:
        placement["runtimeClassName"] = scheduling.runtime_class_name
    return placement
