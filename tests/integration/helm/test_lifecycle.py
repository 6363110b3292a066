"""A release on a real API server, from the installation to after the removal."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.integration.helm.helm_binary import Helm, HelmError
from tests.integration.helm.releases import (
    CRDS,
    Release,
    chart_of_version,
    release,
    run_test_pods,
)
from tests.integration.kube.api import Api
from tests.integration.kube.control_plane import ControlPlane, install_crds
from tests.integration.kube.resources import facts, memory_store

# The certificate of a throw-away API server is its own.
pytestmark = pytest.mark.filterwarnings("ignore:Unverified HTTPS request")

MARK = "inferscale.dev/crd-version"


@pytest.fixture
def installed(helm: Helm, control_plane: ControlPlane, namespace: str) -> Iterator[Release]:
    """A release that a test installs itself; the definitions are there afterwards."""
    with release(helm, control_plane, namespace) as made:
        yield made
    install_crds(control_plane)


@pytest.fixture
def without_crds(installed: Release) -> Release:
    """A cluster that has never seen the project."""
    installed.plane.kubectl("delete", "crd", *CRDS, "--ignore-not-found", "--wait=true")
    return installed


def state(crds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What must not change when nothing is new; the resourceVersion shows every write."""
    return {
        name: (crd["metadata"]["uid"], crd["metadata"]["resourceVersion"], crd["spec"])
        for name, crd in crds.items()
    }


def test_install_upgrades_rollback_and_uninstall(without_crds: Release, tmp_path: Path) -> None:
    made = without_crds
    name = f"{made.name}-inferscale"
    api = Api(made.plane.kubeconfig, made.namespace)

    notes = made.install()
    assert "kubectl get inferscale" in notes
    first = made.crds()
    assert first.keys() == set(CRDS)
    assert made.hooks == [f"{name}-crds"]
    assert made.objects() == {
        ("Deployment", f"{name}-operator"),
        ("Service", f"{name}-operator"),
        ("ServiceAccount", f"{name}-operator"),
        ("NetworkPolicy", f"{name}-operator"),
        ("Role", f"{name}-operator-lease"),
        ("RoleBinding", f"{name}-operator-lease"),
        ("ClusterRole", f"{made.namespace}-{name}-operator"),
        ("ClusterRoleBinding", f"{made.namespace}-{name}-operator"),
        ("ClusterRole", f"{made.namespace}-{name}-operator-nodes"),
        ("ClusterRoleBinding", f"{made.namespace}-{name}-operator-nodes"),
        ("ClusterRole", f"{made.namespace}-{name}-view"),
        ("ClusterRole", f"{made.namespace}-{name}-edit"),
    }, "the hook's objects are gone and nothing else is left"

    api.create("configmaps", facts())
    api.create("memorystores", memory_store("m"))
    store = api.get("memorystores", "m")
    assert store is not None

    made.upgrade("--set", "operator.workers=3")
    made.upgrade("--set", "operator.workers=4")
    assert len(made.hooks) == 3
    assert state(made.crds()) == state(first), "an upgrade to the same release writes nothing"

    made.upgrade(chart=chart_of_version(tmp_path, "99.0.0"))
    newer = made.crds()
    for crd in newer.values():
        assert crd["metadata"]["uid"] == first[crd["metadata"]["name"]]["metadata"]["uid"]
    image = _operator(api, name)["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image.endswith(":99.0.0")

    made.run("rollback", made.name, "2")
    operator = _operator(api, name)["spec"]["template"]["spec"]["containers"][0]
    assert "--workers=3" in operator["args"]
    assert state(made.crds()) == state(newer), "a rollback leaves the definitions"

    made.run("uninstall", made.name)
    assert made.objects() == set()
    assert state(made.crds()) == state(newer)
    left = api.get("memorystores", "m")
    assert left is not None
    assert (left["metadata"]["uid"], left["spec"]) == (store["metadata"]["uid"], store["spec"])
    assert not left["metadata"].get("deletionTimestamp")

    made.install()
    assert state(made.crds()) == state(newer)


def _operator(api: Api, name: str) -> dict[str, Any]:
    live = api.get("deployments", f"{name}-operator")
    assert live is not None
    return live


def test_definitions_of_a_newer_release_are_left_alone(installed: Release) -> None:
    """Two releases in one cluster: the older one's upgrade must not take fields away."""
    marks = ("--overwrite", f"{MARK}=99.0.0")
    installed.plane.kubectl("annotate", "crd", *CRDS, *marks)
    before = state(installed.crds())
    installed.install()
    installed.upgrade()
    assert len(installed.hooks) == 2
    assert state(installed.crds()) == before
    installed.plane.kubectl("annotate", "crd", *CRDS, f"{MARK}-")


def test_changed_definitions_are_brought_back(installed: Release) -> None:
    """Someone removed a column by hand; the upgrade applies the whole definition again."""
    installed.install()
    before = installed.crds()
    patch = [{"op": "remove", "path": "/spec/versions/0/additionalPrinterColumns"}]
    installed.plane.kubectl("patch", "crd", CRDS[0], "--type=json", "-p", json.dumps(patch))
    assert installed.crds()[CRDS[0]]["spec"] != before[CRDS[0]]["spec"]
    installed.upgrade()
    assert installed.crds()[CRDS[0]]["spec"] == before[CRDS[0]]["spec"]


def test_failed_hook_fails_the_installation(installed: Release) -> None:
    """Nothing is installed behind definitions that could not be applied."""
    with pytest.raises(HelmError, match="pre-install"):
        installed.install(chart=_broken(installed))
    assert ("Deployment", f"{installed.name}-inferscale-operator") not in installed.objects()


def _broken(made: Release) -> Path:
    """A chart whose hook calls a subcommand that there is not."""
    chart = chart_of_version(made.plane.folder / made.name, "0.1.0")
    file = chart / "templates" / "crds-hook.yaml"
    file.write_text(file.read_text().replace("args: [crds, apply,", "args: [crds, applied,"))
    return chart


def test_namespaced_installation_touches_nothing_outside(
    installed: Release, control_plane: ControlPlane
) -> None:
    before = state(installed.crds())
    settings = f"watch.namespaces={{{installed.namespace}}},crds.method=none"
    installed.install("--set", settings)
    kinds = {kind for kind, _ in installed.objects()}
    assert kinds == {
        "Deployment", "Service", "ServiceAccount", "NetworkPolicy", "Role", "RoleBinding"
    }  # fmt: skip
    assert installed.hooks == []
    assert state(installed.crds()) == before
    api = Api(control_plane.kubeconfig, installed.namespace)
    operator = _operator(api, f"{installed.name}-inferscale")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    assert f"--namespaces={installed.namespace}" in container["args"]


def test_definitions_as_manifests_stay_too(without_crds: Release, tmp_path: Path) -> None:
    made = without_crds
    made.install("--set", "crds.method=manifest")
    first = made.crds()
    assert first.keys() == set(CRDS)
    made.upgrade("--set", "crds.method=manifest", chart=chart_of_version(tmp_path, "99.0.0"))
    made.upgrade("--set", "crds.method=hook")
    made.run("uninstall", made.name)
    left = made.crds()
    for name in CRDS:
        assert left[name]["metadata"]["uid"] == first[name]["metadata"]["uid"]
        assert left[name]["spec"] == first[name]["spec"]


def test_manifests_take_over_definitions_that_are_there(installed: Release) -> None:
    """As docs/helm.md says: Helm asks for two flags, once."""
    manifest = ("--set", "crds.method=manifest")
    before = installed.crds()
    with pytest.raises(HelmError, match="invalid ownership metadata"):
        installed.install(*manifest)
    installed.install(*manifest, "--take-ownership", "--force-conflicts")
    installed.upgrade(*manifest)
    for name, crd in installed.crds().items():
        assert crd["metadata"]["uid"] == before[name]["metadata"]["uid"]
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send("ok: acting\n")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._send(json.dumps({"choices": [{"message": {"content": "tea"}}], "usage": {}}))

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def test_helm_test_asks_operator_and_model(installed: Release) -> None:
    api = Api(installed.plane.kubeconfig, installed.namespace)
    installed.install("--set", "crds.method=none,test.model=chat,test.user=maya")
    stop = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answer) as server, ThreadPoolExecutor() as pool:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        pods = pool.submit(run_test_pods, api, address, stop)
        try:
            out = installed.run("test", installed.name)
        finally:
            stop.set()
            server.shutdown()
    assert out.count("Succeeded") >= 2
    prefix = f"{installed.name}-inferscale-test"
    assert {(name, code) for name, code, _ in pods.result()} == {
        (f"{prefix}-operator", 0),
        (f"{prefix}-model", 0),
    }
