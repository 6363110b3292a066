"""One release in one namespace, with whoever runs its hook Jobs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.helm.helm_binary import CHART, Helm
from tests.integration.kube.api import Api
from tests.integration.kube.control_plane import BIN, ControlPlane, environment
from tests.integration.kube.job_loop import End, ending_jobs

CRDS = ("memorystores.inferscale.dev", "personalizedmodels.inferscale.dev")


def chart_of_version(folder: Path, version: str) -> Path:
    """A copy of the chart with another version number; the images' tags follow."""
    copy = folder / f"chart-{version}"
    shutil.copytree(CHART, copy)
    file = copy / "Chart.yaml"
    text = re.sub(r"^(version|appVersion): .*$", rf"\1: {version}", file.read_text(), flags=re.M)
    file.write_text(text)
    return copy


def run_hook(api: Api, kubeconfig: Path) -> Callable[[dict[str, Any]], End | None]:
    """Runs the command of a Job's container on this machine, as its pod would.

    Nobody enforces rights here, so it is asked whether the Job's account has been given them.
    """

    def policy(job: dict[str, Any]) -> End | None:
        account = job["spec"]["template"]["spec"]["serviceAccountName"]
        if api.get("serviceaccounts", account) is None or account not in _bound(api):
            return 1, f"ServiceAccount {account} is not there, or has no rights"
        (container,) = job["spec"]["template"]["spec"]["containers"]
        program, *rest = container["command"]
        command = [str(BIN / program), *rest, *container["args"], "--kubeconfig", str(kubeconfig)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=100, env=environment()
        )
        return done.returncode, (done.stdout + done.stderr)[-2000:]

    return policy


def _bound(api: Api) -> set[str]:
    """Accounts of the namespace that a ClusterRoleBinding names, if its role is there."""
    path = "/apis/rbac.authorization.k8s.io/v1"
    roles = {i["metadata"]["name"] for i in api.request("GET", f"{path}/clusterroles")["items"]}
    return {
        subject["name"]
        for binding in api.request("GET", f"{path}/clusterrolebindings")["items"]
        if binding["roleRef"]["name"] in roles
        for subject in binding["subjects"]
        if subject["namespace"] == api.namespace
    }


@dataclass
class Release:
    """A release of the chart.

    Attributes:
        helm: Helm.
        plane: The API server.
        namespace: Its namespace.
        name: Its name.
        hooks: Names of the hook Jobs that ran, in order.
    """

    helm: Helm
    plane: ControlPlane
    namespace: str
    name: str
    hooks: list[str] = field(default_factory=list)

    def run(self, *arguments: str) -> str:
        """Runs helm in the namespace."""
        where = ("--namespace", self.namespace, "--timeout", "100s")
        return self.helm(*arguments, *where, kubeconfig=self.plane.kubeconfig)

    def install(self, *settings: str, chart: Path = CHART) -> str:
        """helm install."""
        return self.run("install", self.name, str(chart), *settings)

    def upgrade(self, *settings: str, chart: Path = CHART) -> str:
        """helm upgrade."""
        return self.run("upgrade", self.name, str(chart), *settings)

    def crds(self) -> dict[str, dict[str, Any]]:
        """The definitions, by name."""
        out = self.plane.kubectl("get", "crd", "-o", "json")
        items = json.loads(out)["items"]
        return {
            item["metadata"]["name"]: item for item in items if item["metadata"]["name"] in CRDS
        }

    def objects(self) -> set[tuple[str, str]]:
        """Kind and name of every object of the release, hooks included.

        Without pods: nobody collects those of Jobs that are gone here.
        """
        kinds = "deployment,service,serviceaccount,networkpolicy,role,rolebinding,job,pdb"
        cluster = "clusterrole,clusterrolebinding"
        labels = ("-l", f"app.kubernetes.io/instance={self.name}", "-o", "json")
        found = json.loads(self.plane.kubectl("get", kinds, *labels, namespace=self.namespace))
        wide = json.loads(self.plane.kubectl("get", cluster, *labels))
        return {(item["kind"], item["metadata"]["name"]) for item in found["items"] + wide["items"]}


@contextmanager
def release(helm: Helm, plane: ControlPlane, namespace: str) -> Iterator[Release]:
    """A release whose name is its namespace's; uninstalled at the end."""
    api = Api(plane.kubeconfig, namespace)
    with ending_jobs(api, run_hook(api, plane.kubeconfig)) as loop:
        made = Release(helm, plane, namespace, namespace, loop.ended)
        try:
            yield made
        finally:
            made.run("uninstall", made.name, "--ignore-not-found")


def run_test_pods(api: Api, address: str, stop: threading.Event) -> list[tuple[str, int, str]]:
    """Runs pods of ``helm test`` on this machine until told to stop.

    Args:
        api: Their namespace.
        address: Where every server is, instead of the Services' names.
        stop: Ends it.

    Returns:
        Name, exit code and output of each.
    """
    done: list[tuple[str, int, str]] = []
    seen: set[str] = set()
    while not stop.wait(0.1):
        for pod in api.list("pods"):
            uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
            if uid in seen or "helm.sh/hook" not in pod["metadata"].get("annotations", {}):
                continue
            seen.add(uid)
            (container,) = pod["spec"]["containers"]
            variables = {item["name"]: item.get("value", "") for item in container["env"]}
            for key in variables.keys() & {"OPERATOR_URL", "MODEL_URL"}:
                assert f".{api.namespace}.svc" in variables[key]
                variables[key] = address
            program, *rest = container["command"]
            ended = subprocess.run(
                [str(BIN / program), *rest],
                env={**environment(), **variables},
                capture_output=True,
                text=True,
                timeout=60,
            )
            phase = "Failed" if ended.returncode else "Succeeded"
            api.patch("pods", name, {"status": {"phase": phase}}, "status")
            done.append((name, ended.returncode, ended.stdout + ended.stderr))
    return done
