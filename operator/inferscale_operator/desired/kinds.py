"""Kinds of objects that the operator reads or writes, and their place in the API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inferscale_operator.api.base import GROUP, VERSION

Manifest = dict[str, Any]
"""One Kubernetes object as JSON."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object.

    Attributes:
        group: API group, ``""`` for the core group.
        version: Version in use.
        kind: Name in manifests.
        plural: Name in URLs.
        namespaced: Whether objects live in namespaces.
        optional: Whether the kind may be unknown to the cluster (another project's CRD).
    """

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True
    optional: bool = False

    @property
    def api_version(self) -> str:
        """``apiVersion`` of manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version


MEMORY_STORE = Kind(GROUP, VERSION, "MemoryStore", "memorystores")
PERSONALIZED_MODEL = Kind(GROUP, VERSION, "PersonalizedModel", "personalizedmodels")

POD = Kind("", "v1", "Pod", "pods")
SERVICE = Kind("", "v1", "Service", "services")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
SECRET = Kind("", "v1", "Secret", "secrets")
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
CLAIM = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
NAMESPACE = Kind("", "v1", "Namespace", "namespaces", namespaced=False)
NODE = Kind("", "v1", "Node", "nodes", namespaced=False)
EVENT = Kind("", "v1", "Event", "events")
ROLE = Kind("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
JOB = Kind("batch", "v1", "Job", "jobs")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
AUTOSCALER = Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
SCALED_OBJECT = Kind("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects", optional=True)
POD_MONITOR = Kind("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors", optional=True)

CUSTOM_KINDS = (MEMORY_STORE, PERSONALIZED_MODEL)
CHILD_KINDS = (
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    SECRET,
    CONFIG_MAP,
    CLAIM,
    NETWORK_POLICY,
    JOB,
    DEPLOYMENT,
    SERVICE,
    DISRUPTION_BUDGET,
    AUTOSCALER,
    SCALED_OBJECT,
    POD_MONITOR,
)
"""Kinds of children, in the order in which they are applied."""

_BY_NAME = {(kind.group, kind.kind): kind for kind in (*CUSTOM_KINDS, *CHILD_KINDS, POD, LEASE)}


def kind_of(manifest: Manifest) -> Kind:
    """The kind of a manifest.

    Raises:
        KeyError: For a kind that the operator does not handle.
    """
    group, _, _ = str(manifest["apiVersion"]).rpartition("/")
    return _BY_NAME[group, str(manifest["kind"])]
