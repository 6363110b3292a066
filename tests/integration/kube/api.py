"""Plain requests to the API server, for tests that need many of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config

# The certificate of a throw-away API server is its own.
urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)

PATHS = {
    "namespaces": "/api/v1",
    "pods": "/api/v1",
    "services": "/api/v1",
    "configmaps": "/api/v1",
    "secrets": "/api/v1",
    "events": "/api/v1",
    "serviceaccounts": "/api/v1",
    "persistentvolumeclaims": "/api/v1",
    "jobs": "/apis/batch/v1",
    "deployments": "/apis/apps/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "horizontalpodautoscalers": "/apis/autoscaling/v2",
    "leases": "/apis/coordination.k8s.io/v1",
    "roles": "/apis/rbac.authorization.k8s.io/v1",
    "rolebindings": "/apis/rbac.authorization.k8s.io/v1",
    "memorystores": "/apis/inferscale.dev/v1alpha1",
    "personalizedmodels": "/apis/inferscale.dev/v1alpha1",
}
MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """A refused request; ``code`` is its HTTP status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text[:500]}")
        self.code = code


class Api:
    """One namespace of an API server.

    Args:
        kubeconfig: How to reach it.
        namespace: The namespace.
    """

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._client = config.new_client_from_config(str(kubeconfig))
        self.namespace = namespace

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> dict[str, Any]:
        """One request; the decoded answer."""
        method, url, headers, _, _ = self._client.param_serialize(
            method,
            path,
            header_params={"Accept": "application/json", "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._client.call_api(method, url, headers, body, _request_timeout=30)
            data = answer.read()
        except client.ApiException as error:
            raise ApiError(error.status, str(error.body)) from error
        if answer.status >= 300:
            raise ApiError(answer.status, data.decode(errors="replace"))
        return dict(json.loads(data)) if data else {}

    def path(self, plural: str, name: str = "", subresource: str = "") -> str:
        """Path of a collection or an object in the namespace."""
        parts = [PATHS[plural], "namespaces", self.namespace, plural, name, subresource]
        return "/".join(part for part in parts if part)

    def get(self, plural: str, name: str) -> dict[str, Any] | None:
        """An object, or None."""
        try:
            return self.request("GET", self.path(plural, name))
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def list(self, plural: str) -> list[dict[str, Any]]:
        """All objects of a kind."""
        return list(self.request("GET", self.path(plural)).get("items") or [])

    def names(self, plural: str) -> set[str]:
        """Names of all objects of a kind."""
        return {item["metadata"]["name"] for item in self.list(plural)}

    def create(self, plural: str, body: dict[str, Any]) -> dict[str, Any]:
        """Makes an object."""
        return self.request("POST", self.path(plural), body)

    def patch(self, plural: str, name: str, body: Any, subresource: str = "") -> dict[str, Any]:
        """Merges into an object."""
        return self.request("PATCH", self.path(plural, name, subresource), body, MERGE)

    def delete(self, plural: str, name: str) -> None:
        """Deletes an object in the background, if it is there."""
        options = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
        }
        try:
            self.request("DELETE", self.path(plural, name), options)
        except ApiError as error:
            if error.code != 404:
                raise

    def condition(self, plural: str, name: str, kind: str) -> dict[str, Any]:
        """One condition of an object; empty when it is not there."""
        live = self.get(plural, name) or {}
        for item in live.get("status", {}).get("conditions", []):
            if item["type"] == kind:
                return dict(item)
        return {}
