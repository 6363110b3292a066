"""``inferscale-operator crds print|apply``: the definitions of the custom kinds, from the models.

``apply`` is what the chart runs before an installation and before an upgrade, because Helm itself
never changes definitions that are there already. Several releases may share one cluster, so a
definition that a newer release wrote is left alone.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from inferscale_operator.api.base import GROUP
from inferscale_operator.api.crdgen import crd_text
from inferscale_operator.api.crds import DEFINITIONS, build_crd
from inferscale_operator.cluster.errors import ClusterError, ConflictError, UnavailableError
from inferscale_operator.cluster.transport import (
    APPLY,
    NotFoundError,
    Transport,
    load_configuration,
)
from inferscale_operator.settings import VERSION

COMMAND = "crds"
FIELD_MANAGER = "inferscale-crds"
VERSION_ANNOTATION = f"{GROUP}/crd-version"
"""On a definition: the release that wrote it."""
POLL_SECONDS = 0.5
_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def definitions(version: str = VERSION) -> list[dict[str, Any]]:
    """The definitions, each marked with the release that it belongs to."""
    crds = [build_crd(definition) for definition in DEFINITIONS]
    for crd in crds:
        crd["metadata"]["annotations"] = {VERSION_ANNOTATION: version}
    return crds


def is_newer(version: str, than: str) -> bool:
    """Whether one release is newer than another; words after the three numbers do not count."""
    return _numbers(version) > _numbers(than)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(part) for part in found.groups()) if found else (0, 0, 0)


def text_of(crds: Sequence[Mapping[str, Any]]) -> str:
    """All definitions as one YAML stream."""
    return "---\n".join(crd_text(dict(crd)) for crd in crds)


async def apply_definition(
    transport: Transport, crd: Mapping[str, Any], deadline: float, version: str = VERSION
) -> str:
    """Applies one definition and waits until the API server serves it.

    Args:
        transport: Requests.
        crd: The definition.
        deadline: Monotonic time to give up at; until then errors that may pass are tried again.
        version: The release that it belongs to.

    Returns:
        What was done, in words.

    Raises:
        ClusterError: It is refused, or there was no time left.
    """
    name = crd["metadata"]["name"]
    while True:
        try:
            live = await _read(transport, name)
            written = str(_annotations(live).get(VERSION_ANNOTATION) or "0.0.0")
            if live is not None and is_newer(written, version):
                return f"left alone: it is that of the newer release {written}"
            applied = await transport.request(
                "PATCH",
                f"{_PATH}/{name}",
                query={"fieldManager": FIELD_MANAGER, "force": "true"},
                body=crd,
                content_type=APPLY,
            )
            while not _established(applied):
                if time.monotonic() > deadline:
                    raise ClusterError(f"{name} is stored, but the API server does not serve it")
                await asyncio.sleep(POLL_SECONDS)
                applied = await _read(transport, name)
            return "created" if live is None else "up to date"
        except (UnavailableError, ConflictError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(POLL_SECONDS)


async def _read(transport: Transport, name: str) -> dict[str, Any] | None:
    try:
        return dict(await transport.request("GET", f"{_PATH}/{name}"))
    except NotFoundError:
        return None


def _annotations(live: Mapping[str, Any] | None) -> Mapping[str, str]:
    return ((live or {}).get("metadata") or {}).get("annotations") or {}


def _established(crd: Mapping[str, Any] | None) -> bool:
    conditions = ((crd or {}).get("status") or {}).get("conditions") or []
    return any(item["type"] == "Established" and item["status"] == "True" for item in conditions)


async def apply_all(kubeconfig: str | None, context: str | None, timeout_seconds: float) -> int:
    """Applies all definitions; one line for each on standard output.

    Returns:
        The exit code: 0 done, 1 refused or too late, 2 no API server is named.
    """
    try:
        configuration = await load_configuration(kubeconfig, context)
    except ValueError as error:
        print(f"inferscale-operator {COMMAND}: {error}", file=sys.stderr)
        return 2
    transport = Transport(configuration, timeout_seconds=min(30.0, timeout_seconds))
    deadline = time.monotonic() + timeout_seconds
    try:
        for crd in definitions():
            done = await apply_definition(transport, crd, deadline)
            print(f"{crd['metadata']['name']}: {done}")
    except ClusterError as error:
        print(f"inferscale-operator {COMMAND}: {error}", file=sys.stderr)
        return 1
    finally:
        await transport.close()
    return 0


def run(arguments: Sequence[str]) -> int:
    """The subcommand.

    Args:
        arguments: Words after ``crds``.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog=f"inferscale-operator {COMMAND}",
        description="The custom resource definitions of this release.",
        epilog="Exit codes of apply: 0 done; 1 the API server refused or did not answer in time; "
        "2 no API server is named.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("print", help="write them to standard output", allow_abbrev=False)
    apply = actions.add_parser(
        "apply", help="store them by server-side apply and wait until they are served"
    )
    apply.add_argument("--kubeconfig", metavar="FILE", help="default: the pod's service account")
    apply.add_argument("--context", metavar="NAME", help="context of the kubeconfig")
    apply.add_argument(
        "--timeout-seconds", type=float, default=120.0, metavar="SECONDS", help="default: 120"
    )
    options = parser.parse_args(arguments)
    if options.action == "print":
        sys.stdout.write(text_of(definitions()))
        return 0
    return asyncio.run(apply_all(options.kubeconfig, options.context, options.timeout_seconds))
