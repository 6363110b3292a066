"""Settings of the operator process: flags, else ``INFERSCALE_*``, else defaults.

Read once, in ``main``.
"""

from __future__ import annotations

import argparse
import socket
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

VERSION = version("inferscale")
ENV_PREFIX = "INFERSCALE_"
SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

NamespaceName = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]

MonitorLabel = Annotated[
    str,
    Field(
        max_length=381,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
        r"=([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
    ),
]
LISTS = ("namespaces", "metrics_namespaces", "monitor_labels")
"""Settings that are several words separated by commas."""


class Settings(BaseModel):
    """Everything that the process can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    namespaces: tuple[NamespaceName, ...] = ()
    """Namespaces to serve, separated by commas; all namespaces when empty."""
    kubeconfig: str | None = None
    """Kubeconfig file; without it the pod's service account, else the default kubeconfig."""
    context: str | None = None
    """Context of the kubeconfig; its current one when absent."""
    runtime_image: str = Field(f"inferscale/runtime:{VERSION}", min_length=1)
    """Image of encoding jobs and servers whose resource names none."""
    activator_image: str = Field(f"inferscale/operator:{VERSION}", min_length=1)
    """Image of the activators of models that scale to zero: this operator's own."""
    operator_namespace: NamespaceName | None = None
    """Namespace of this operator, for network policies and the lease; found out inside a pod."""
    router_image: str = Field(f"inferscale/router:{VERSION}", min_length=1)
    """Image of routers whose resource names none."""
    metrics_namespaces: tuple[NamespaceName, ...] = ()
    """Namespaces whose pods may reach servers, routers and encoders to read metrics, separated by
    commas: where Prometheus runs."""
    monitor_labels: tuple[MonitorLabel, ...] = ()
    """Labels on PodMonitors, by which Prometheus chooses them: name=value, separated by commas."""
    erase_timeout_seconds: int = Field(600, ge=10, le=86_400)
    """Longest time that the deletion of a MemoryStore waits for its bytes to be erased."""
    http_host: str = "0.0.0.0"
    """Address of the port for probes and metrics."""
    http_port: int = Field(8080, ge=0, le=65_535)
    """Port for /healthz, /readyz and /metrics; 0 takes a free one."""
    workers: int = Field(8, ge=1, le=256)
    """Resources that are worked at together."""
    resync_seconds: float = Field(600.0, gt=0, le=86_400)
    """Every resource is looked at again after this time, without an event."""
    compare_seconds: float = Field(120.0, gt=0, le=86_400)
    """Time between two comparisons of lists with what the watches told."""
    hung_seconds: float = Field(600.0, ge=10, le=86_400)
    """/healthz fails when work waits and none was finished for so long."""
    request_timeout_seconds: float = Field(30.0, ge=1, le=300)
    """Longest time of one request to the API server."""
    lease_name: str = Field("inferscale-operator", min_length=1, max_length=253)
    """Name of the Lease: of all operators that share it one acts."""
    lease_namespace: NamespaceName | None = None
    """Namespace of the Lease; that of the operator, else the first served one, else default."""
    lease_seconds: float = Field(15.0, ge=1, le=3600)
    """How long others wait after the acting operator's last sign of life."""
    identity: str = Field(default_factory=lambda: f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
    """Name of this process in the Lease, unlike any other; made up when absent."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""
    log_format: Literal["json", "text"] = "json"
    """json: one object per line."""

    @property
    def label_pairs(self) -> tuple[tuple[str, str], ...]:
        """Names and values of ``monitor_labels``."""
        return tuple((name, value) for name, _, value in map(_halves, self.monitor_labels))

    @property
    def lease_place(self) -> str:
        """Namespace of the Lease."""
        return (
            self.lease_namespace
            or self.operator_namespace
            or next(iter(self.namespaces), None)
            or "default"
        )


def read_settings(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    namespace_file: Path = SERVICE_ACCOUNT_NAMESPACE,
) -> Settings:
    """The settings of a command line.

    Args:
        arguments: Words after the program's name.
        environment: The environment.
        namespace_file: Where a pod finds its namespace.

    Raises:
        ValueError: A value is wrong; one line for each names flag, value and rule.
        SystemExit: ``--help``, ``--version``, or an unknown flag.
    """
    parsed = {k: v for k, v in vars(_parser().parse_args(arguments)).items() if v is not None}
    values: dict[str, Any] = {
        name: environment[variable(name)]
        for name in Settings.model_fields
        if environment.get(variable(name))
    } | parsed
    for name in LISTS:
        if name in values:
            words = str(values[name]).split(",")
            values[name] = tuple(word.strip() for word in words if word.strip())
    if "operator_namespace" not in values and namespace_file.is_file():
        values["operator_namespace"] = namespace_file.read_text().strip()
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{flag(str(item['loc'][0]))} {item['input']!r}: {item['msg']}"
            for item in error.errors()
        ]
        raise ValueError("\n".join(lines)) from error


def _halves(label: str) -> tuple[str, str, str]:
    return label.partition("=")


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inferscale-operator",
        description="Keeps MemoryStores and PersonalizedModels of a Kubernetes cluster as they "
        "are asked for.",
        epilog="Exit codes: 0 stopped by a signal; 1 the lease was lost or the API server "
        "refused what the operator needs; 2 wrong settings.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    for name, field in Settings.model_fields.items():
        default = "" if field.default_factory or field.default in (None, ()) else field.default
        shown = f" Default: {default}." if default != "" else ""
        text = f"{' '.join((field.description or '').split())}{shown} [{variable(name)}]"
        parser.add_argument(flag(name), metavar="VALUE", help=text.replace("%", "%%"))
    return parser
