"""Parts that the pods of jobs and servers share.

Every pod fits the ``restricted`` Pod Security Standard. Defaults of the API are written out, and
what the API server leaves out when it is empty is left out here too: what is applied equals what is
read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inferscale_operator.api.base import Model, Scheduling, SecretKeyRef
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


@dataclass(slots=True)
class Mounts:
    """Volumes and mounts under construction; a volume and its mount are added together."""

    volumes: list[Manifest] = field(default_factory=list)
    mounts: list[Manifest] = field(default_factory=list)

    def add(self, name: str, path: str, source: Manifest, *, read_only: bool = False) -> None:
        """Adds a volume and mounts it."""
        self.volumes.append({"name": name, **source})
        mount: Manifest = {"name": name, "mountPath": path}
        # A claim is mounted read-only here and not in the volume: some drivers refuse to attach
        # one disk to a node both ways.
        self.mounts.append(mount | {"readOnly": True} if read_only else mount)

    def add_claim(self, name: str, path: str, claim: str, *, read_only: bool = False) -> None:
        """Adds a PersistentVolumeClaim."""
        source = {"persistentVolumeClaim": {"claimName": claim}}
        self.add(name, path, source, read_only=read_only)

    def add_config_map(self, name: str, path: str, config_map: str, key: str | None = None) -> None:
        """Adds a ConfigMap, or one key of it."""
        source: Manifest = {"name": config_map, "defaultMode": READABLE_MODE}
        if key is not None:
            source["items"] = [{"key": key, "path": key}]
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
        mounts.add_claim("models", paths.MODELS, claim)


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
        variables.append({"name": "AWS_REGION", "value": place.region})
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
    scheduling: Scheduling,
) -> Manifest:
    """A pod template.

    Args:
        labels: Of the pods.
        annotations: Of the pods; may be empty.
        spec: What differs between pods: containers, volumes, restart policy, service account.
        scheduling: Node selection and pull secrets.
    """
    metadata: Manifest = {"labels": dict(labels)}
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"metadata": metadata, "spec": _pod_defaults() | _placement(scheduling) | spec}


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
