"""The router before the servers: the vLLM project's ``vllm-router``.

Each generation has routers of its own, which know the pods of that generation only, so that the
Service moves from one generation to the next in one step, with or without routers. What is said of
the router's behaviour was measured with version 0.1.17 (docs/routing.md).
"""

from __future__ import annotations

from dataclasses import replace

from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.api.routing import Routing
from inferscale_operator.desired import naming, paths, pod
from inferscale_operator.desired.account import account_name, build_account, build_role
from inferscale_operator.desired.availability import TOPOLOGY_KEYS
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.kinds import DEPLOYMENT, DISRUPTION_BUDGET, Manifest
from inferscale_operator.desired.quantities import router_resources
from inferscale_operator.desired.selection import (
    ROUTER,
    deployment_name,
    generation_selector,
    router_selector,
)

PRE_STOP_SECONDS = 10
"""How long a stopping router still takes requests: endpoints are updated meanwhile."""
GRACE_MARGIN_SECONDS = 20
POLICIES = {"consistentHash": "consistent_hash", "stickyLeastLoaded": "sticky_least_loaded"}
MAX_BODY_BYTES = 32 * 1024 * 1024
"""The router holds bodies in memory; its own limit of 512 MiB is more than its pod has."""
WATCH_PODS: Manifest = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}

_HEALTH = (
    # Two failures a second apart: a dead server is left within 2 s. A busy one answers within 5 s.
    *("--health-check-interval-secs", "1"),
    *("--health-check-timeout-secs", "5"),
    *("--health-failure-threshold", "2"),
    *("--health-success-threshold", "1"),
    # Six tries over 4.7 s: longer than it takes to find out that a server is dead.
    *("--retry-max-retries", "6"),
    *("--retry-initial-backoff-ms", "250"),
    *("--retry-backoff-multiplier", "1.7"),
    *("--retry-max-backoff-ms", "3000"),
    # It counts every answer of 5xx: ten for one user whose memory cannot be read would take the
    # server from all others for a minute, and then the next server.
    "--disable-circuit-breaker",
)


def router_name(owner: naming.Owner, generation: str) -> str:
    """Name of a generation's router Deployment."""
    return f"{deployment_name(owner, generation)}-{ROUTER}"


def build_router_base(owner: naming.Owner, spec: PersonalizedModelSpec) -> list[Manifest]:
    """What the routers of all generations share; nothing without routing."""
    routing = spec.routing
    if routing.provider == "none":
        return []
    shared = [build_account(owner, ROUTER), *build_role(owner, ROUTER, [WATCH_PODS])]
    if routing.replicas > 1:
        body = {
            "maxUnavailable": 1,
            "selector": {"matchLabels": router_selector(owner)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
        name = account_name(owner, ROUTER)
        shared.append(naming.child(DISRUPTION_BUDGET, owner, name, ROUTER, {"spec": body}))
    return shared


def build_router(
    owner: naming.Owner, spec: PersonalizedModelSpec, defaults: Defaults, generation: str
) -> list[Manifest]:
    """The routers of one generation; nothing without routing.

    Args:
        owner: The PersonalizedModel.
        spec: Its spec.
        defaults: How the operator was installed.
        generation: The generation whose servers they know.
    """
    routing = spec.routing
    if routing.provider == "none":
        return []
    mounts = pod.Mounts()
    mounts.add_empty("tmp", paths.TEMPORARY)
    labels = naming.labels(owner, ROUTER) | {naming.GENERATION: generation}
    pod_spec: Manifest = {
        "automountServiceAccountToken": True,
        "containers": [_container(owner, routing, defaults, generation, mounts)],
        "restartPolicy": "Always",
        "serviceAccountName": account_name(owner, ROUTER),
        # It ends when the streams that go through it have ended.
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS
        + spec.serving.shutdown_timeout_seconds
        + GRACE_MARGIN_SECONDS,
        "topologySpreadConstraints": [
            {
                "labelSelector": {"matchLabels": router_selector(owner, generation)},
                "maxSkew": 1,
                "topologyKey": TOPOLOGY_KEYS["Node"],
                "whenUnsatisfiable": "ScheduleAnyway",
            }
        ],
    }
    body = {
        "progressDeadlineSeconds": 600,
        "replicas": routing.replicas,
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": router_selector(owner, generation)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": pod.pod_template(labels, {}, pod_spec, mounts, routing),
    }
    name = router_name(owner, generation)
    return [naming.child(DEPLOYMENT, owner, name, ROUTER, {"spec": body}, generation=generation)]


def _container(
    owner: naming.Owner, routing: Routing, defaults: Defaults, generation: str, mounts: pod.Mounts
) -> Manifest:
    return pod.container(
        ROUTER,
        ["vllm-router"],
        _arguments(owner, routing, generation),
        scheduling=routing,
        defaults=replace(defaults, runtime_image=defaults.router_image),
        body={
            "env": [
                {"name": "HOME", "value": paths.TEMPORARY},
                # At its level "info" the router writes the header that names the user.
                {"name": "RUST_LOG", "value": "warn"},
                *pod.port_environment(paths.HTTP_PORT_NUMBER),
            ],
            "ports": [
                pod.container_port(paths.HTTP_PORT, paths.HTTP_PORT_NUMBER),
                pod.container_port(paths.METRICS_PORT, paths.ROUTER_METRICS_PORT_NUMBER),
            ],
            "resources": router_resources(routing.resources),
            "volumeMounts": mounts.mounts,
            "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
            # Ready as soon as it knows a healthy server.
            "readinessProbe": _probe("/readiness", period=2, failures=3),
            "livenessProbe": _probe("/liveness", period=10, failures=6),
        },
    )


def _arguments(owner: naming.Owner, routing: Routing, generation: str) -> list[str]:
    selector = generation_selector(owner, generation)
    return [
        "--host",
        "0.0.0.0",
        "--port",
        paths.PORT_REFERENCE,
        "--prometheus-host",
        "0.0.0.0",
        "--prometheus-port",
        str(paths.ROUTER_METRICS_PORT_NUMBER),
        "--policy",
        POLICIES[routing.policy],
        "--service-discovery",
        "--service-discovery-namespace",
        owner["metadata"]["namespace"],
        "--service-discovery-port",
        str(paths.HTTP_PORT_NUMBER),
        "--selector",
        *(f"{name}={value}" for name, value in sorted(selector.items())),
        "--max-payload-size",
        str(MAX_BODY_BYTES),
        *_HEALTH,
    ]


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    return {
        "failureThreshold": failures,
        "httpGet": {"path": path, "port": paths.HTTP_PORT, "scheme": "HTTP"},
        "periodSeconds": period,
        "successThreshold": 1,
        "timeoutSeconds": 5,
    }
