"""Children of a PersonalizedModel: what lasts; the other builders are named here for callers."""

from __future__ import annotations

from collections.abc import Container, Mapping

from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired import naming
from inferscale_operator.desired.account import build_account
from inferscale_operator.desired.activator import build_activator
from inferscale_operator.desired.autoscaling import build_autoscaler
from inferscale_operator.desired.availability import build_disruption_budget
from inferscale_operator.desired.claims import build_model_claim
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.deployment import build_generation, server_generation
from inferscale_operator.desired.kinds import Manifest
from inferscale_operator.desired.monitoring import build_pod_monitors
from inferscale_operator.desired.network import build_server_policy
from inferscale_operator.desired.router import build_router_base
from inferscale_operator.desired.secret import api_key_secret_name, build_api_key_secret
from inferscale_operator.desired.selection import COMPONENT, deployment_name, server_selector
from inferscale_operator.desired.service import build_servers_service, build_service

__all__ = [
    "api_key_secret_name",
    "build_activator",
    "build_api_key_secret",
    "build_disruption_budget",
    "build_generation",
    "build_server_base",
    "build_servers_service",
    "build_service",
    "deployment_name",
    "server_generation",
    "server_selector",
]


def build_server_base(
    owner: naming.Owner,
    spec: PersonalizedModelSpec,
    defaults: Defaults,
    optional_kinds: Container[str] = (),
    metric_names: Mapping[str, str] | None = None,
) -> list[Manifest]:
    """What a PersonalizedModel has whichever generation serves.

    Args:
        owner: The PersonalizedModel.
        spec: Its spec.
        defaults: How the operator was installed.
        optional_kinds: Optional kinds that the cluster knows.
        metric_names: vLLM's metric name of each signal that a server was seen to have.

    Returns:
        ServiceAccount, and what the spec asks for of NetworkPolicy, model claim, autoscaler,
        PodMonitors and what routers share.
    """
    routed = spec.routing.provider != "none"
    sleeps = spec.autoscaling.scale_to_zero is not None
    wanted = (
        build_server_policy(owner, spec.network, defaults, routed=routed),
        build_model_claim(owner, spec.model, COMPONENT),
        build_autoscaler(owner, spec, optional_kinds, metric_names or {}),
    )
    return [
        build_account(owner, COMPONENT),
        *(manifest for manifest in wanted if manifest is not None),
        *build_pod_monitors(owner, optional_kinds, defaults, routed=routed, sleeps=sleeps),
        *build_router_base(owner, spec),
    ]
