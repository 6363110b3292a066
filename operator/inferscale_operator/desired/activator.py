"""The activator of a model that scales to zero: a small proxy that holds requests and wakes it.

It may do one thing in the cluster: change the size of its model. It finds servers by a Service that
selects them whether or not they get the traffic.
"""

from __future__ import annotations

from dataclasses import replace

from inferscale_operator.api.autoscaling import ScaleToZero
from inferscale_operator.api.base import GROUP, Scheduling, SecretKeyRef
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired import naming, paths, pod
from inferscale_operator.desired.account import account_name, build_account, build_role
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.kinds import DEPLOYMENT, PERSONALIZED_MODEL, Manifest
from inferscale_operator.desired.secret import API_KEY
from inferscale_operator.desired.selection import ACTIVATOR, activator_name, activator_selector

PRE_STOP_SECONDS = 10
"""How long a stopping activator still takes requests: endpoints are updated meanwhile."""
GRACE_MARGIN_SECONDS = 20
HELD_GRACE_SECONDS = 300
"""Most of a held request's wait that a stopping activator waits for (arbitrary)."""
RESOURCES: Manifest = {
    "requests": {"cpu": "10m", "memory": "96Mi"},
    "limits": {"memory": "256Mi"},
}
"""Bodies of held requests take at most 64 MiB, see ``activator.admission``."""


def build_activator(
    owner: naming.Owner,
    spec: PersonalizedModelSpec,
    scale_to_zero: ScaleToZero,
    defaults: Defaults,
    api_key_secret: str | None,
) -> list[Manifest]:
    """ServiceAccount, Role, RoleBinding and Deployment.

    Args:
        owner: The PersonalizedModel.
        spec: Its spec.
        scale_to_zero: Its limits.
        defaults: How the operator was installed; without an image nothing is built.
        api_key_secret: Secret with the key ``api-key``; None when there is no single key.
    """
    if defaults.activator_image is None:
        return []
    scale_its_model = {
        "apiGroups": [GROUP],
        "resources": [f"{PERSONALIZED_MODEL.plural}/scale"],
        "resourceNames": [owner["metadata"]["name"]],
        "verbs": ["get", "patch"],
    }
    return [
        build_account(owner, ACTIVATOR),  # its pod asks for the token
        *build_role(owner, ACTIVATOR, [scale_its_model]),
        _deployment(owner, spec, scale_to_zero, defaults, api_key_secret),
    ]


def _deployment(
    owner: naming.Owner,
    spec: PersonalizedModelSpec,
    scale_to_zero: ScaleToZero,
    defaults: Defaults,
    api_key_secret: str | None,
) -> Manifest:
    # Servers' node selection is about GPUs: the activator must run when no such node is there.
    scheduling = Scheduling(
        image_pull_policy=spec.serving.image_pull_policy,
        image_pull_secrets=spec.serving.image_pull_secrets,
    )
    mounts = pod.Mounts()
    mounts.add_empty("tmp", paths.TEMPORARY)
    if api_key_secret is not None:
        mounts.add_key(
            "auth-keys", paths.AUTH_KEYS_FILE, SecretKeyRef(name=api_key_secret, key=API_KEY)
        )
    container = pod.container(
        ACTIVATOR,
        ["inferscale-operator", ACTIVATOR],
        [*_arguments(owner, spec, scale_to_zero), *_key_arguments(spec, api_key_secret)],
        scheduling=scheduling,
        defaults=replace(defaults, runtime_image=defaults.activator_image or ""),
        body={
            "env": [
                *pod.base_environment(),
                *pod.port_environment(paths.HTTP_PORT_NUMBER),
            ],
            "ports": [pod.container_port(paths.HTTP_PORT, paths.HTTP_PORT_NUMBER)],
            "resources": RESOURCES,
            "volumeMounts": mounts.mounts,
            "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
            "startupProbe": _probe(failures=60, period=2),
            "readinessProbe": _probe(failures=3, period=5),
            "livenessProbe": _probe(failures=3, period=20),
        },
    )
    # Like the servers it lets begun answers end, and it waits for servers that are coming up.
    longest = max(
        spec.serving.shutdown_timeout_seconds,
        min(scale_to_zero.max_wait_seconds, HELD_GRACE_SECONDS),
    )
    template = pod.pod_template(
        naming.labels(owner, ACTIVATOR),
        {},
        {
            "automountServiceAccountToken": True,
            "containers": [container],
            "restartPolicy": "Always",
            "serviceAccountName": account_name(owner, ACTIVATOR),
            "terminationGracePeriodSeconds": PRE_STOP_SECONDS + longest + GRACE_MARGIN_SECONDS,
        },
        mounts,
        scheduling,
    )
    body = {
        "progressDeadlineSeconds": 600,
        "replicas": 1,
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": activator_selector(owner)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": template,
    }
    return naming.child(DEPLOYMENT, owner, activator_name(owner), ACTIVATOR, {"spec": body})


def _arguments(
    owner: naming.Owner, spec: PersonalizedModelSpec, scale_to_zero: ScaleToZero
) -> list[str]:
    metadata = owner["metadata"]
    longest = max(
        spec.serving.shutdown_timeout_seconds,
        min(scale_to_zero.max_wait_seconds, HELD_GRACE_SECONDS),
    )
    return [
        "--name",
        metadata["name"],
        "--namespace",
        metadata["namespace"],
        "--host",
        "0.0.0.0",
        "--port",
        paths.PORT_REFERENCE,
        "--wake-replicas",
        str(spec.autoscaling.awake_minimum),
        "--max-held-requests",
        str(scale_to_zero.max_held_requests),
        "--max-wait-seconds",
        str(scale_to_zero.max_wait_seconds),
        "--drain-seconds",
        str(longest),
    ]


def _key_arguments(spec: PersonalizedModelSpec, api_key_secret: str | None) -> list[str]:
    if api_key_secret is not None:
        return ["--api-key-file", paths.AUTH_KEYS_FILE]
    # Documents of keys and signatures are checked by servers alone.
    return [] if spec.auth.mode == "none" else ["--require-token"]


def _probe(*, failures: int, period: int) -> Manifest:
    return {
        "failureThreshold": failures,
        "httpGet": {"path": "/health", "port": paths.HTTP_PORT, "scheme": "HTTP"},
        "periodSeconds": period,
        "successThreshold": 1,
        "timeoutSeconds": 5,
    }
