"""How a model that has become ready is asked: the curl line, and where its key is kept."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path

from inferscale_operator.cluster.base import Cluster
from inferscale_operator.desired.kinds import (
    CONFIG_MAP,
    MEMORY_STORE,
    PERSONALIZED_MODEL,
    SECRET,
    Manifest,
)
from inferscale_operator.local.console import ANY_USER, Console, curl_line, readiness_note, user_of

API_KEY = "api-key"

Name = tuple[str, str]
"""(namespace, name) of a PersonalizedModel."""


class Announcer:
    """Says once, each time a model becomes ready, how to ask it.

    Args:
        cluster: Models, stores, ConfigMaps and Secrets with their values.
        console: Where to say it.
        keys: Folder for files with API keys, so that no key need be printed.
    """

    def __init__(self, cluster: Cluster, console: Console, keys: Path) -> None:
        self._cluster = cluster
        self._console = console
        self._keys = keys
        self._announced: set[Name] = set()

    async def sync(self, ports: Mapping[Name, int]) -> None:
        """One look at all models.

        Args:
            ports: Port of loopback of each model.
        """
        for model in await self._cluster.list(PERSONALIZED_MODEL):
            key = (model["metadata"]["namespace"], model["metadata"]["name"])
            if not is_ready(model) or key not in ports:
                self._announced.discard(key)
            elif key not in self._announced:
                self._announced.add(key)
                await self._announce(model, ports[key])

    async def _announce(self, model: Manifest, port: int) -> None:
        namespace, name = model["metadata"]["namespace"], model["metadata"]["name"]
        stores = [item["name"] for item in model["spec"]["memoryStores"]]
        user, store = None, None
        for candidate in stores:
            user = await self._user_of_store(namespace, candidate)
            if user is not None:
                store = candidate if len(stores) > 1 else None
                break
        key_file = await self._key_file(model)
        self._console.say(f"PersonalizedModel/{name} answers{readiness_note(user)}:")
        auth = model["spec"].get("auth") or {}
        token = auth.get("mode", "none") != "none" and key_file is None
        asked = ANY_USER if user is None else user
        self._console.plain(curl_line(name, port, asked, store, key_file, token))

    async def _user_of_store(self, namespace: str, name: str) -> str | None:
        store = await self._cluster.get(MEMORY_STORE, namespace, name)
        source = ((store or {}).get("spec") or {}).get("source", {}).get("configMap")
        if not source:
            return None
        live = await self._cluster.get(CONFIG_MAP, namespace, source["name"])
        return user_of(live, source.get("key"))

    async def _key_file(self, model: Manifest) -> str | None:
        """The API key in a file for the user alone, so that it need not be printed."""
        auth = model["spec"].get("auth") or {}
        if auth.get("mode") != "apiKey" or auth.get("keysSecretRef"):
            return None
        namespace, name = model["metadata"]["namespace"], model["metadata"]["name"]
        secret = (auth.get("secretRef") or {}).get("name") or f"{name}-{API_KEY}"
        live = await self._cluster.get(SECRET, namespace, secret)
        value = ((live or {}).get("data") or {}).get(API_KEY, "")
        path = self._keys / namespace / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(base64.b64decode(value))
        return str(path)


def is_ready(resource: Manifest) -> bool:
    """Whether the condition ``Ready`` of a custom resource holds."""
    conditions = (resource.get("status") or {}).get("conditions") or []
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
