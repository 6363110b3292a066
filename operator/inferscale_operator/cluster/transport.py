"""HTTP to the API server: requests with raw JSON bodies, timeouts, and errors by what to do.

One connection pool for the whole process. Nothing here knows what is asked; see ``client``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config
from kubernetes.aio.config.config_exception import ConfigException

from inferscale_operator.cluster.errors import (
    AlreadyExistsError,
    ClusterError,
    ConflictError,
    InvalidError,
    UnavailableError,
)
from inferscale_operator.desired.kinds import Kind

JSON = "application/json"
APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"

_WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_MESSAGE_LIMIT = 1000

OnRequest = Callable[[str, str], None]
"""Told of every request: its verb, and its status code or ``error``."""


class NotFoundError(ClusterError):
    """The path leads to nothing (404); inside this package only."""

    reason = "NotFound"


class GoneError(ClusterError):
    """A list's continuation is too old (410); inside this package only."""

    reason = "Gone"


async def load_configuration(kubeconfig: str | None, context: str | None) -> Configuration:
    """How to reach the API server.

    Args:
        kubeconfig: File; None takes the pod's service account, else the default kubeconfig.
        context: Context inside the file; None takes its current one.

    Raises:
        ValueError: Neither works; the message says what was tried.
    """
    # The class keeps a default instance; going through type.__call__ makes a fresh one.
    configuration = type.__call__(Configuration)
    try:
        if kubeconfig is None and context is None:
            try:
                load_incluster_config(client_configuration=configuration)
                return configuration
            except ConfigException:
                pass
        await load_kube_config(
            config_file=kubeconfig, context=context, client_configuration=configuration
        )
    except (ConfigException, OSError) as error:
        where = f"--kubeconfig {kubeconfig}" if kubeconfig else "the default kubeconfig"
        raise ValueError(
            f"no API server: not inside a pod, and {where} cannot be used: {error}"
        ) from error
    return configuration


def path_of(
    kind: Kind, namespace: str | None = None, name: str | None = None, subresource: str = ""
) -> str:
    """URL path of an object or of a collection."""
    parts = [f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"]
    if kind.namespaced and namespace is not None:
        parts.append(f"namespaces/{quote(namespace, safe='')}")
    parts.append(kind.plural)
    if name is not None:
        parts.append(quote(name, safe=""))
    if subresource:
        parts.append(subresource)
    return "/".join(parts)


class Transport:
    """Requests to one API server.

    Args:
        configuration: Where it is and who we are.
        timeout_seconds: Longest time of one request.
        on_request: Told of every request, for metrics.
        may_write: Asked before each write; raises when this process must not act any more.
        max_connections: Size of the connection pool.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        timeout_seconds: float = 30.0,
        on_request: OnRequest | None = None,
        may_write: Callable[[], None] | None = None,
        max_connections: int = 32,
    ) -> None:
        configuration.connection_pool_maxsize = max_connections
        self._client = ApiClient(configuration=configuration)
        self._client.user_agent = "inferscale-operator"
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=10.0)
        self._on_request = on_request
        self.may_write = may_write

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | Sequence[Any] | None = None,
        content_type: str = JSON,
    ) -> Any:
        """One request; the decoded answer.

        Raises:
            ClusterError: One of ``cluster.errors``, or ``NotFoundError`` or ``GoneError``.
        """
        if method in _WRITES and self.may_write is not None:
            self.may_write()
        headers = {"Accept": JSON, "Content-Type": content_type}
        try:
            method, url, headers, _, _ = await self._client.param_serialize(
                method,
                path,
                query_params=list(query.items()) if query else None,
                header_params=headers,
                auth_settings=["BearerToken"],
            )
            answer = await self._client.call_api(
                method, url, headers, body, _request_timeout=self._timeout
            )
            data = await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self._told(method, "error")
            what = type(error).__name__
            raise UnavailableError(f"{method} {path}: no answer ({what})") from error
        self._told(method, str(answer.status))
        if answer.status >= 300:
            raise error_of(method, path, answer.status, data, answer.getheaders())
        try:
            return json.loads(data) if data else {}
        except ValueError as error:
            raise UnavailableError(f"{method} {path}: the answer is no JSON") from error

    def _told(self, method: str, code: str) -> None:
        if self._on_request is not None:
            self._on_request(method, code)


def error_of(
    method: str, path: str, code: int, data: bytes, headers: Mapping[str, str]
) -> ClusterError:
    """The error for an answer.

    Args:
        method: Verb of the request.
        path: Path of the request.
        code: HTTP status, 300 or above.
        data: Body: a ``Status`` object, or whatever a proxy put there.
        headers: Headers of the answer.
    """
    status = _status(data)
    reason = str(status.get("reason") or "")
    details = status.get("details") or {}
    causes = [cause.get("reason") for cause in details.get("causes") or [] if cause]
    message = f"{method} {path}: {code} {status.get('message') or ''}"[:_MESSAGE_LIMIT].rstrip()
    if code in (401, 408, 429) or code >= 500 or code < 400:
        return UnavailableError(message, _retry_after(headers, details))
    if code == 404:
        return NotFoundError(message)
    if code == 410:
        return GoneError(message)
    if code == 409:
        return (AlreadyExistsError if reason == "AlreadyExists" else ConflictError)(message)
    if "NamespaceTerminating" in causes:
        return ConflictError(message)
    # A JSON patch whose `test` fails has no causes; an object that is refused names its fields.
    if code == 422 and not causes:
        return ConflictError(message)
    return InvalidError(message)


def _status(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) and value.get("kind") == "Status" else {}


def _retry_after(headers: Mapping[str, str], details: Mapping[str, Any]) -> float | None:
    for value in (headers.get("Retry-After"), details.get("retryAfterSeconds")):
        try:
            if value is not None and float(value) > 0:
                return min(float(value), 300.0)
        except ValueError:
            continue
    return None
