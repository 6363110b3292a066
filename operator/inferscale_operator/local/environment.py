"""Environment of a container: values, references to other objects, fields of the Pod; pure.

Objects are looked up by a function that the caller passes in. What is missing is a
``MissingError``, which the executor shows as ``CreateContainerConfigError``, as a kubelet does.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from typing import Any

from inferscale_operator.desired.kinds import CONFIG_MAP, SECRET, Kind, Manifest
from inferscale_operator.local.expansion import expand

PORT_VARIABLE = "INFERSCALE_PORT"
POD_IP = "127.0.0.1"

Lookup = Callable[[Kind, str], Manifest | None]
"""Finds an object of the pod's namespace by kind and name."""

_KEYED = re.compile(r"metadata\.(annotations|labels)\['([^']+)'\]")
_VARIABLE_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")


class MissingError(Exception):
    """An object, a key or a field that the container needs is not there."""


def object_texts(kind: Kind, name: str, optional: bool, lookup: Lookup) -> dict[str, bytes]:
    """All keys of a ConfigMap or Secret.

    Raises:
        MissingError: Without the object, unless it is optional.
    """
    manifest = lookup(kind, name)
    if manifest is None:
        if optional:
            return {}
        raise MissingError(f'{kind.kind.lower()} "{name}" not found')
    encoded = "data" if kind == SECRET else "binaryData"
    plain = "stringData" if kind == SECRET else "data"
    result = {key: text.encode() for key, text in (manifest.get(plain) or {}).items()}
    for key, text in (manifest.get(encoded) or {}).items():
        try:
            result[key] = base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error):
            raise MissingError(f'{kind.kind} "{name}": key "{key}" is not base64') from None
    return result


def field_value(pod: Manifest, path: str) -> str:
    """What ``fieldRef`` gives.

    Raises:
        MissingError: For a field that is not supported here.
    """
    metadata = pod["metadata"]
    keyed = _KEYED.fullmatch(path)
    if keyed:
        return str((metadata.get(keyed.group(1)) or {}).get(keyed.group(2), ""))
    fields = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata.get("namespace", ""),
        "metadata.uid": metadata.get("uid", ""),
        "spec.nodeName": pod["spec"].get("nodeName", ""),
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", ""),
        "status.podIP": POD_IP,
        "status.hostIP": POD_IP,
    }
    if path not in fields:
        raise MissingError(f'fieldRef "{path}" is not supported here')
    return str(fields[path])


def container_environment(
    pod: Manifest, container: Mapping[str, Any], ports: Mapping[str, int], lookup: Lookup
) -> dict[str, str]:
    """The variables that the manifest asks for, in Kubernetes' order: ``envFrom``, then ``env``.

    Args:
        pod: The Pod.
        container: One of its containers.
        ports: Port of this machine for each named port. ``INFERSCALE_PORT`` is the one that stands
            for the container port of its value, or for the first.
        lookup: Finds ConfigMaps and Secrets.

    Raises:
        MissingError: Naming what is missing.
    """
    result: dict[str, str] = {}
    numbers = {
        str(item["containerPort"]): str(ports[item["name"]])
        for item in container.get("ports") or []
        if item.get("name") in ports
    }
    if numbers:
        result[PORT_VARIABLE] = next(iter(numbers.values()))
    for source in container.get("envFrom") or []:
        result |= _from_object(source, lookup)
    for entry in container.get("env") or []:
        value = _entry_value(pod, entry, result, lookup)
        if value is not None:
            is_port = entry["name"] == PORT_VARIABLE
            result[entry["name"]] = numbers.get(value, value) if is_port else value
    return result


def _from_object(source: Mapping[str, Any], lookup: Lookup) -> dict[str, str]:
    prefix = source.get("prefix") or ""
    for name, kind in (("configMapRef", CONFIG_MAP), ("secretRef", SECRET)):
        if name in source:
            reference = source[name]
            texts = object_texts(kind, reference["name"], bool(reference.get("optional")), lookup)
            return {
                prefix + key: text.decode()
                for key, text in texts.items()
                if _VARIABLE_NAME.fullmatch(prefix + key)
            }
    return {}


def _entry_value(
    pod: Manifest, entry: Mapping[str, Any], known: Mapping[str, str], lookup: Lookup
) -> str | None:
    source = entry.get("valueFrom")
    if not source:
        return expand(entry.get("value") or "", known)
    for name, kind in (("configMapKeyRef", CONFIG_MAP), ("secretKeyRef", SECRET)):
        if name in source:
            reference = source[name]
            optional = bool(reference.get("optional"))
            texts = object_texts(kind, reference["name"], optional, lookup)
            if reference["key"] in texts:
                return texts[reference["key"]].decode()
            if optional:
                return None
            raise MissingError(
                f"couldn't find key {reference['key']} in {kind.kind} {reference['name']}"
            )
    if "fieldRef" in source:
        return field_value(pod, source["fieldRef"]["fieldPath"])
    raise MissingError(f'variable "{entry["name"]}": this valueFrom is not supported here')
