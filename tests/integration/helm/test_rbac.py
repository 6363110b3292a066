"""The chart's rights against the calls that the operator makes, recorded before the API server.

Every call must be granted, and every right must be used: by a recorded call, by the way in which
all kinds of children are treated, or for a reason that is written down here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.integration.helm.helm_binary import Helm
from tests.integration.kube.api import Api
from tests.integration.kube.control_plane import ControlPlane, eventually
from tests.integration.kube.job_loop import ending_jobs
from tests.integration.kube.operator_process import running_operator
from tests.integration.kube.proxy import Seen, running_proxy
from tests.integration.kube.resources import facts, memory_store, personalized_model

from inferscale_operator.desired.kinds import CHILD_KINDS
from inferscale_operator.handlers.observe import UNWATCHED_KINDS

# The certificate of a throw-away API server is its own.
pytestmark = pytest.mark.filterwarnings("ignore:Unverified HTTPS request")

Right = tuple[str, str, str]
"""API group, resource with subresource, verb."""

CHILD_VERBS = ("get", "list", "watch", "create", "patch", "delete")
UNWATCHED_VERBS = ("get", "create", "delete")
"""For children that are made once, never applied and never watched."""
UNSEEN: dict[Right, str] = {
    ("", "nodes", "list"): "read only for models that ask for GPUs",
    ("", "pods", "watch"): "handed on to routers",
    ("", "pods", "patch"): "only when a model gets smaller and its servers told their load",
    ("inferscale.dev", "personalizedmodels/scale", "get"): "given on to activators",
    ("", "events", "patch"): "an Event that comes again within an hour is counted up",
    ("inferscale.dev", "memorystores/finalizers", "update"): "asked for by an admission plugin",
    ("inferscale.dev", "personalizedmodels/finalizers", "update"): "as above",
}


@dataclass(frozen=True)
class Call:
    """One request in the words of RBAC."""

    right: Right
    name: str
    namespaced: bool


_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/v\w+"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


def calls_of(seen: Seen) -> Iterator[Call]:
    """What a request asks for; nothing for discovery, which everybody may read."""
    url = urlsplit(seen.path)
    match = _PATH.fullmatch(url.path)
    if match is None:
        return
    query = parse_qs(url.query)
    name = match["name"] or ""
    if seen.verb == "GET":
        verb = "watch" if query.get("watch") == ["true"] else "get" if name else "list"
    elif seen.verb == "DELETE":
        verb = "delete" if name else "deletecollection"
    else:
        verb = _VERBS[seen.verb]
    resource = match["plural"] + (f"/{match['sub']}" if match["sub"] else "")
    group = match["group"] or ""
    namespaced = match["namespace"] is not None
    yield Call((group, resource, verb), name, namespaced)
    if verb == "patch" and "force" in query:
        # Server-side apply makes what is missing.
        yield Call((group, resource, "create"), name, namespaced)


@pytest.mark.parametrize(
    ("verb", "path", "right"),
    [
        ("GET", "/api/v1/pods?limit=5", ("", "pods", "list")),
        ("GET", "/apis/batch/v1/namespaces/n/jobs?watch=true", ("batch", "jobs", "watch")),
        ("GET", "/api/v1/namespaces/n", ("", "namespaces", "get")),
        ("GET", "/api/v1/namespaces/n/secrets/s", ("", "secrets", "get")),
        ("PATCH", "/apis/g.x/v1/namespaces/n/as/b/status", ("g.x", "as/status", "patch")),
        ("DELETE", "/apis/g.x/v1/namespaces/n/as/b", ("g.x", "as", "delete")),
    ],
)
def test_requests_are_read_as_the_api_server_reads_them(verb: str, path: str, right: Right) -> None:
    assert [call.right for call in calls_of(Seen(verb, path, 200))] == [right]


def test_apply_needs_two_rights_and_discovery_none() -> None:
    apply = Seen("PATCH", "/api/v1/namespaces/n/services/s?fieldManager=m&force=true", 200)
    assert [call.right[2] for call in calls_of(apply)] == ["patch", "create"]
    assert not list(calls_of(Seen("GET", "/apis/batch/v1", 200)))
    assert not list(calls_of(Seen("GET", "/apis", 200)))


def grants(rules: list[dict[str, Any]], call: Call) -> bool:
    """Whether a rule allows a call."""
    group, resource, verb = call.right
    return any(
        group in rule["apiGroups"]
        and resource in rule["resources"]
        and verb in rule["verbs"]
        and (not rule.get("resourceNames") or call.name in rule["resourceNames"])
        for rule in rules
    )


def rights_of(rules: list[dict[str, Any]]) -> set[Right]:
    """All combinations that rules grant."""
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def operator_rules(helm: Helm, *settings: str) -> list[dict[str, Any]]:
    """Rules of the operator's account."""
    manifests = helm.template(*settings)
    bindings = [item for item in manifests if item["kind"] in ("RoleBinding", "ClusterRoleBinding")]
    names = {
        item["roleRef"]["name"]
        for item in bindings
        if item["subjects"][0]["name"] == "inferscale-operator"
    }
    roles = [item for item in manifests if item["metadata"]["name"] in names and "rules" in item]
    return [rule for role in roles for rule in role["rules"]]


@pytest.fixture(scope="module")
def rules(helm: Helm) -> list[dict[str, Any]]:
    return operator_rules(helm)


def test_namespaced_mode_grants_the_same_inside_the_namespace(
    helm: Helm, rules: list[dict[str, Any]]
) -> None:
    namespaced = operator_rules(helm, "--set", "watch.namespaces={team}")
    assert namespaced == [rule for rule in rules if rule["resources"] != ["nodes"]]


def test_the_right_to_list_nodes_can_be_left_out(helm: Helm) -> None:
    left = operator_rules(helm, "--set", "rbac.nodes=false")
    assert ("", "nodes", "list") not in rights_of(left)


def live_through(api: Api) -> None:
    """Lets an operator make, change and erase whatever it can."""
    api.create("configmaps", facts())
    api.create("memorystores", memory_store("m"))
    model = personalized_model(
        "p",
        "m",
        auth={"mode": "apiKey"},
        serving={"replicas": 2},
        autoscaling={"provider": "hpa", "maxReplicas": 3},
    )
    api.create("personalizedmodels", model)
    eventually(
        lambda: api.condition("memorystores", "m", "Ready").get("status") == "True", "m is ready"
    )
    eventually(lambda: api.names("deployments"), "p has a Deployment")
    assert api.names("secrets") == {"p-api-key"}
    api.delete("networkpolicies", "p-server")
    eventually(lambda: "p-server" in api.names("networkpolicies"), "the policy is back")
    size = {
        "provider": "operator",
        "minReplicas": 3,
        "scaleToZero": {"idleSeconds": 600},
        "maxReplicas": 3,
    }
    api.patch("personalizedmodels", "p", {"spec": {"autoscaling": size}})
    eventually(
        lambda: (api.get("personalizedmodels", "p") or {})["spec"]["serving"]["replicas"] == 3,
        "p has the least size",
    )
    eventually(lambda: "p-activator" in api.names("rolebindings"), "p has an activator")
    change = {
        "spec": {"auth": {"mode": "none"}, "autoscaling": {"provider": "none", "scaleToZero": None}}
    }
    api.patch("personalizedmodels", "p", change)
    eventually(lambda: not api.names("secrets"), "the key is gone")
    eventually(lambda: not api.names("horizontalpodautoscalers"), "the autoscaler is gone")
    eventually(lambda: not api.names("roles"), "the activator's Role is gone")
    api.delete("memorystores", "m")
    eventually(lambda: api.get("memorystores", "m") is None, "m is erased")
    eventually(lambda: api.list("events"), "an Event is posted")


@pytest.fixture(scope="module", params=["namespaced", "cluster"])
def recorded(
    request: pytest.FixtureRequest,
    control_plane: ControlPlane,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Call]:
    """Calls of an operator that serves one namespace, or all."""
    folder: Path = tmp_path_factory.mktemp("rbac")
    name = f"rbac-{request.param}"
    control_plane.kubectl("create", "namespace", name)
    api = Api(control_plane.kubeconfig, name)
    flags = ["--lease-name", "inferscale-operator", "--compare-seconds", "2"]
    if request.param == "cluster":
        flags += ["--namespaces", ""]
    with (
        running_proxy(control_plane.kubeconfig, folder) as proxy,
        running_operator(proxy.kubeconfig, name, folder, *flags) as operator,
        ending_jobs(api),
    ):
        live_through(api)
        assert operator.stop() == 0
        return [call for seen in list(proxy.seen) for call in calls_of(seen)]


def test_every_call_is_granted(recorded: list[Call], rules: list[dict[str, Any]]) -> None:
    assert len(recorded) > 50
    refused = {(*call.right, call.name) for call in recorded if not grants(rules, call)}
    assert refused == set()


def test_every_right_is_used(recorded: list[Call], rules: list[dict[str, Any]]) -> None:
    children = {
        (kind.group, kind.plural, verb)
        for kind in CHILD_KINDS
        for verb in (UNWATCHED_VERBS if kind in UNWATCHED_KINDS else CHILD_VERBS)
    }
    seen = {call.right for call in recorded}
    assert rights_of(rules) - seen - children - UNSEEN.keys() == set(), "granted, never used"
    assert children <= rights_of(rules)


def test_secrets_are_never_listed(recorded: list[Call]) -> None:
    secrets = {call.right[2] for call in recorded if call.right[1] == "secrets"}
    assert secrets == {"get", "create", "delete"}


def test_a_missing_right_would_be_noticed(
    recorded: list[Call], rules: list[dict[str, Any]]
) -> None:
    without_pods = [rule for rule in rules if rule["resources"] != ["pods"]]
    assert len(without_pods) == len(rules) - 1
    assert {call.right for call in recorded if not grants(without_pods, call)} == {
        ("", "pods", "list")
    }


def test_operator_of_one_namespace_asks_for_nothing_outside(
    recorded: list[Call], request: pytest.FixtureRequest
) -> None:
    outside = {call.right for call in recorded if not call.namespaced}
    if request.node.callspec.params["recorded"] == "namespaced":
        assert outside == {("", "namespaces", "get")}
    else:
        assert ("batch", "jobs", "watch") in outside
        assert {verb for _, _, verb in outside} == {"get", "list", "watch"}
