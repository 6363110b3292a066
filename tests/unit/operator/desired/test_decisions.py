"""What of a spec decides what: one table for each kind of child."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from inferscale_operator.api.memorystore import MemoryStoreSpec, S3Location
from inferscale_operator.api.personalizedmodel import PersonalizedModelSpec
from inferscale_operator.desired.autoscaling import build_autoscaler, requests_query
from inferscale_operator.desired.defaults import Defaults
from inferscale_operator.desired.deployment import GpuShare
from inferscale_operator.desired.encoder import (
    build_encode_run,
    build_encoder_base,
    build_erase_job,
)
from inferscale_operator.desired.pod import literal
from inferscale_operator.desired.quantities import asks_for_gpus
from inferscale_operator.desired.secret import build_api_key_secret
from inferscale_operator.desired.server import (
    build_disruption_budget,
    build_generation,
    build_server_base,
    build_service,
    server_generation,
)
from inferscale_operator.desired.stores import StoreView, embedder_conflict, s3_conflict

DEFAULTS = Defaults("image", operator_namespace="ops")
NAMES = {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting"}
INPUT = "0123456789abcdef"


def _owner(kind: str, name: str = "x") -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "namespace": "team", "uid": "u"}}


def _store(**fields: Any) -> MemoryStoreSpec:
    base = {"model": {"id": "m"}, "source": {"configMap": {"name": "facts"}}}
    return MemoryStoreSpec.model_validate(base | fields)


def _model(**fields: Any) -> PersonalizedModelSpec:
    base = {"model": {"id": "m"}, "memoryStores": [{"name": "s"}]}
    return PersonalizedModelSpec.model_validate(base | fields)


def _view(name: str = "s", digit: str = "a", **fields: Any) -> StoreView:
    return StoreView(name, _store(**fields), digit * 64)


def _job(**fields: Any) -> dict[str, Any]:
    return build_encode_run(_owner("MemoryStore"), _store(**fields), DEFAULTS, INPUT, 0)[1]


def _generation(spec: PersonalizedModelSpec, *views: StoreView, **options: Any) -> list[Any]:
    stores = views or (_view(),)
    generation = server_generation(spec, stores)
    options = {"api_key_secret": None} | options
    owner = _owner("PersonalizedModel")
    return build_generation(owner, spec, stores, DEFAULTS, generation, **options)


def _pod(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return spec


def _option(manifest: dict[str, Any], flag: str) -> str | None:
    arguments = _pod(manifest)["containers"][0]["args"]
    return arguments[arguments.index(flag) + 1] if flag in arguments else None


def _volume(manifest: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((v for v in _pod(manifest)["volumes"] if v["name"] == name), None)


def _names(manifests: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(m["kind"], m["metadata"]["name"]) for m in manifests}


@pytest.mark.parametrize(
    ("source", "argument", "volume"),
    [
        ({"configMap": {"name": "f"}}, "/source", {"name": "f", "defaultMode": 0o444}),
        (
            {"configMap": {"name": "f", "key": "a.txt"}},
            "/source/a.txt",
            {"name": "f", "defaultMode": 0o444, "items": [{"key": "a.txt", "path": "a.txt"}]},
        ),
        ({"pvc": {"claimName": "c"}}, "/source", {"claimName": "c"}),
        ({"pvc": {"claimName": "c", "path": "d/e"}}, "/source/d/e", {"claimName": "c"}),
        ({"http": {"url": "https://h/x"}}, "https://h/x", None),
        ({"s3": {"url": "s3://bucket/x"}}, "s3://bucket/x", None),
    ],
)
def test_where_facts_are_read(source: dict[str, Any], argument: str, volume: Any) -> None:
    job = _job(source=source)
    assert _option(job, "--input") == argument
    found = _volume(job, "source")
    assert (found and (found.get("configMap") or found["persistentVolumeClaim"])) == volume


@pytest.mark.parametrize(
    ("storage", "made", "mounted", "url"),
    [
        ({"pvc": {}}, {"x-store"}, "x-store", "/store"),
        ({"pvc": {"size": "1Gi"}}, {"x-store"}, "x-store", "/store"),
        ({"pvc": {"claimName": "own"}}, set(), "own", "/store/x"),
        ({"s3": {"url": "s3://bucket/p"}}, set(), None, "s3://bucket/p"),
    ],
)
def test_where_the_store_is(storage: Any, made: set[str], mounted: Any, url: str) -> None:
    spec = _store(storage=storage)
    base = build_encoder_base(_owner("MemoryStore"), spec, DEFAULTS)
    claims = {name for kind, name in _names(base) if kind == "PersistentVolumeClaim"}
    assert claims == made
    erase = build_erase_job(_owner("MemoryStore"), spec, DEFAULTS)
    assert _pod(erase)["containers"][0]["args"][:2] == ["erase", url]
    for job in (_job(storage=storage), erase):
        volume = _volume(job, "store")
        assert (volume and volume["persistentVolumeClaim"]["claimName"]) == mounted
    assert _option(_job(storage=storage), "--store") == url


@pytest.mark.parametrize(
    ("cache", "made", "volume"),
    [
        ({}, set(), {"emptyDir": {}}),
        ({"size": "1Gi"}, {"x-models"}, {"persistentVolumeClaim": {"claimName": "x-models"}}),
        ({"claimName": "w"}, set(), {"persistentVolumeClaim": {"claimName": "w"}}),
    ],
)
def test_where_weights_are_kept(cache: Any, made: set[str], volume: Any) -> None:
    spec = _model(model={"id": "m", "cache": cache})
    base = build_server_base(_owner("PersonalizedModel"), spec, DEFAULTS)
    claims = {name for kind, name in _names(base) if kind == "PersistentVolumeClaim"}
    assert claims == made
    assert _volume(_generation(spec)[1], "models") == {"name": "models"} | volume


@pytest.mark.parametrize(
    ("storage", "cache", "labels"),
    [
        ({"pvc": {}}, {}, {"volume.inferscale.dev/s-store"}),
        ({"pvc": {}}, {"size": "1Gi"}, {"volume.inferscale.dev/s-store"}),
        ({"pvc": {"accessMode": "ReadWriteMany"}}, {}, set()),
        ({"pvc": {"claimName": "own"}}, {}, set()),
        ({"s3": {"url": "s3://bucket/p"}}, {"size": "1Gi"}, {"volume.inferscale.dev/x-models"}),
    ],
)
def test_pods_that_share_a_disk_run_on_one_node(storage: Any, cache: Any, labels: set[str]) -> None:
    spec = _model(model={"id": "m", "cache": cache})
    template = _generation(spec, _view(storage=storage))[1]["spec"]["template"]
    found = {name for name in template["metadata"]["labels"] if name.startswith("volume.")}
    assert found == labels
    affinity = template["spec"].get("affinity", {}).get("podAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    keys = {e["key"] for t in terms for e in t["labelSelector"]["matchExpressions"]}
    assert keys == labels
    assert ("topologySpreadConstraints" in template["spec"]) == (not labels)


def test_the_encoder_and_the_servers_of_a_store_share_a_label() -> None:
    job = build_encode_run(_owner("MemoryStore", "s"), _store(), DEFAULTS, INPUT, 0)[1]
    label = "volume.inferscale.dev/s-store"
    assert label in job["spec"]["template"]["metadata"]["labels"]
    assert label in _generation(_model())[1]["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize(
    ("spread", "key"),
    [
        ("None", None),
        ("Node", "kubernetes.io/hostname"),
        ("Zone", "topology.kubernetes.io/zone"),
    ],
)
def test_spreading(spread: str, key: str | None) -> None:
    store = _view(storage={"s3": {"url": "s3://bucket/p"}})
    deployment = _generation(_model(serving={"spread": spread}), store)[1]
    constraints = _pod(deployment).get("topologySpreadConstraints", [])
    assert [c["topologyKey"] for c in constraints] == ([key] if key else [])
    assert all(c["whenUnsatisfiable"] == "ScheduleAnyway" for c in constraints)


BASE = {
    "model": {"id": "m", "revision": "1", "dtype": "float32"},
    "serving": {"engineArgs": ["--max-num-seqs", "8"]},
}


@pytest.mark.parametrize(
    "change",
    [
        {"model": BASE["model"] | {"id": "n"}},
        {"model": BASE["model"] | {"revision": "2"}},
        {"model": BASE["model"] | {"dtype": "float16"}},
        {"serving": {"engineArgs": ["--max-num-seqs", "9"]}},
    ],
)
def test_what_makes_a_generation(change: dict[str, Any]) -> None:
    before = server_generation(_model(**BASE), [_view()])
    assert server_generation(_model(**(BASE | change)), [_view()]) != before


@pytest.mark.parametrize(
    "change",
    [
        {"retrieval": {"topK": 5}},
        {"tiers": {"dram": "2Gi"}},
        {"serving": BASE["serving"] | {"replicas": 5, "image": "other"}},
        {"auth": {"mode": "apiKey"}},
        {"network": {"enabled": False}},
    ],
)
def test_what_stays_in_its_generation(change: dict[str, Any]) -> None:
    before = server_generation(_model(**BASE), [_view()])
    assert server_generation(_model(**(BASE | change)), [_view()]) == before


def test_stores_make_a_generation_and_their_order_does_not() -> None:
    one = server_generation(_model(), [_view("a"), _view("b", "b")])
    assert server_generation(_model(), [_view("b", "b"), _view("a")]) == one
    assert server_generation(_model(), [_view("a"), _view("b", "c")]) != one
    assert server_generation(_model(), [_view("a")]) != one


def test_a_changed_setting_is_another_config_map_and_another_pod_template() -> None:
    old = _generation(_model())
    new = _generation(_model(retrieval={"topK": 5}))
    assert old[1]["metadata"]["name"] == new[1]["metadata"]["name"]
    assert old[0]["metadata"]["name"] != new[0]["metadata"]["name"]
    for config, deployment in (old, new):
        volume = _volume(deployment, "config")
        assert volume is not None
        assert volume["configMap"]["name"] == config["metadata"]["name"]


def test_generations_share_no_config_map() -> None:
    one = _generation(_model())[0]["metadata"]["name"]
    assert _generation(_model(model={"id": "n"}))[0]["metadata"]["name"] != one


def test_replicas_are_the_specs_with_an_autoscaler_too() -> None:
    spec = _model(serving={"replicas": 3}, autoscaling={"provider": "hpa", "maxReplicas": 2})
    assert _generation(spec)[1]["spec"]["replicas"] == 3
    assert _generation(_model(serving={"replicas": 0}))[1]["spec"]["replicas"] == 0


def test_a_stopping_server_has_time_for_its_answers() -> None:
    deployment = _generation(_model(serving={"shutdownTimeoutSeconds": 300}))[1]
    assert _option(deployment, "--shutdown-timeout") == "300"
    pod = _pod(deployment)
    (container,) = pod["containers"]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] == pause + 300 + 20


@pytest.mark.parametrize(("seconds", "failures"), [(30, 6), (31, 7), (1800, 360)])
def test_a_starting_server_has_its_time(seconds: int, failures: int) -> None:
    deployment = _generation(_model(serving={"startupTimeoutSeconds": seconds}))[1]
    probe = _pod(deployment)["containers"][0]["startupProbe"]
    assert probe["failureThreshold"] == failures
    assert probe["failureThreshold"] * probe["periodSeconds"] >= seconds
    assert deployment["spec"]["progressDeadlineSeconds"] > seconds


JWT = {"issuer": "https://i", "audience": ["a"], "jwksUri": "https://i/keys"}


@pytest.mark.parametrize(
    ("auth", "secret", "volume", "path"),
    [
        ({"mode": "apiKey"}, "made", ("made", "api-key"), "keys_file"),
        (
            {"mode": "apiKey", "keysSecretRef": {"name": "s", "key": "k.json"}},
            None,
            ("s", "k.json"),
            "keys_file",
        ),
        (
            {
                "mode": "jwt",
                "jwt": {
                    "issuer": "https://i",
                    "audience": ["a"],
                    "jwksSecretRef": {"name": "j", "key": "set"},
                },
            },
            None,
            ("j", "set"),
            "jwks_file",
        ),
    ],
)
def test_credentials_are_files_where_the_settings_say(
    auth: dict[str, Any], secret: str | None, volume: tuple[str, str], path: str
) -> None:
    config, deployment = _generation(_model(auth=auth), api_key_secret=secret)
    settings = json.loads(config["data"]["config.json"])["auth"]
    assert settings["mode"] == auth["mode"]
    file = (settings.get("jwt") or settings)[path]
    folder, _, name = file.rpartition("/")
    pod = _pod(deployment)
    [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == folder]
    assert mount["readOnly"]
    [source] = [v["secret"] for v in pod["volumes"] if v["name"] == mount["name"]]
    assert (source["secretName"], source["items"]) == (
        volume[0],
        [{"key": volume[1], "path": name}],
    )


def test_auth_settings_stand_in_the_config_only_when_given() -> None:
    def settings(**auth: Any) -> Any:
        return json.loads(_generation(_model(auth=auth))[0]["data"]["config.json"]).get("auth")

    assert settings() is None
    assert settings(limits={"userRequestsPerMinute": 60}, audit="Log") == {
        "limits": {"burst": 20, "user_requests_per_minute": 60},
        "audit": "log",
    }
    jwt = settings(mode="jwt", jwt={**JWT, "leewaySeconds": 5, "scopeClaim": "scp"})["jwt"]
    assert jwt["jwks_uri"] == "https://i/keys"
    assert (jwt["leeway_seconds"], jwt["scope_claim"], jwt["user_claim"]) == (5, "scp", "sub")


def test_the_made_secret_holds_the_key() -> None:
    secret = build_api_key_secret(_owner("PersonalizedModel"), "geheim")
    assert secret["data"] == {"api-key": "Z2VoZWlt"}


@pytest.mark.parametrize(
    ("replicas", "unavailable", "budget"), [(0, 1, None), (1, 1, None), (2, 1, 1), (9, 3, 3)]
)
def test_disruption_budget(replicas: int, unavailable: int, budget: int | None) -> None:
    spec = _model(serving={"replicas": replicas}, disruption={"maxUnavailable": unavailable})
    made = build_disruption_budget(_owner("PersonalizedModel"), spec, "g")
    assert (made and made["spec"]["maxUnavailable"]) == budget


def test_traffic_moves_by_the_generation_alone() -> None:
    owner = _owner("PersonalizedModel")
    one, two = (build_service(owner, generation)["spec"] for generation in ("g1", "g2"))
    assert one["selector"].pop("inferscale.dev/generation") == "g1"
    assert two["selector"].pop("inferscale.dev/generation") == "g2"
    assert one == two


KEDA = {"provider": "keda", "prometheusAddress": "http://p"}


@pytest.mark.parametrize(
    ("autoscaling", "known", "kinds"),
    [
        ({}, [], set()),
        ({"provider": "hpa"}, [], {"HorizontalPodAutoscaler"}),
        (KEDA, [], set()),
        (KEDA, ["ScaledObject"], {"ScaledObject"}),
        ({}, ["ScaledObject", "PodMonitor"], {"PodMonitor"}),
    ],
)
def test_optional_children(autoscaling: Any, known: list[str], kinds: set[str]) -> None:
    spec = _model(autoscaling=autoscaling)
    base = build_server_base(_owner("PersonalizedModel"), spec, DEFAULTS, known, NAMES)
    optional = {"HorizontalPodAutoscaler", "ScaledObject", "PodMonitor"}
    assert {m["kind"] for m in base} & optional == kinds
    for manifest in base:
        target = manifest.get("spec", {}).get("scaleTargetRef")
        assert target is None or target["kind"] == "PersonalizedModel"


def test_the_query_counts_pods_of_this_model_only() -> None:
    query = requests_query(_owner("PersonalizedModel", "chat"), NAMES, held=False)
    (pattern,) = set(re.findall(r'pod=~"([^"]*)"', query))
    assert re.fullmatch(pattern, "chat-3a1744ea40-5d8f9c7b6d-x2x4z")
    assert not re.fullmatch(pattern, "chat-b-3a1744ea40-5d8f9c7b6d-x2x4z")
    assert not re.fullmatch(pattern, "chat-0123456789-3a1744ea40-5d8f9c7b6d-x2x4z")
    assert 'namespace="team"' in query


def test_an_autoscaler_names_only_metrics_that_were_seen() -> None:
    owner = _owner("PersonalizedModel")
    target = {"requests": 4, "kvCachePercent": 80, "ttftP95Ms": 500}
    keda = _model(autoscaling={**KEDA, "target": target})
    hpa = _model(autoscaling={"provider": "hpa", "target": target})
    for names, count in (({}, None), (NAMES, 1), (NAMES | {"kvCache": "vllm:x"}, 2)):
        for spec, part in ((keda, "triggers"), (hpa, "metrics")):
            built = build_autoscaler(owner, spec, ["ScaledObject"], names)
            assert (built and len(built["spec"][part])) == count
    built = build_autoscaler(owner, keda, ["ScaledObject"], NAMES | {"kvCache": "vllm:x"})
    assert built is not None
    assert "sum(vllm:x{" in built["spec"]["triggers"][1]["metadata"]["query"]
    assert built["spec"]["triggers"][1]["metadata"]["threshold"] == "0.8"


def test_keda_counts_what_the_activator_holds_and_may_go_to_zero() -> None:
    spec = _model(autoscaling={**KEDA, "scaleToZero": {"idleSeconds": 60}, "minReplicas": 2})
    built = build_autoscaler(_owner("PersonalizedModel"), spec, ["ScaledObject"], NAMES)
    assert built is not None
    query = built["spec"]["triggers"][0]["metadata"]["query"]
    assert "inferscale_activator_held_requests" in query
    assert query.count("or vector(0)") == 3  # a model without pods must not hide what waits
    assert (built["spec"]["idleReplicaCount"], built["spec"]["minReplicaCount"]) == (0, 2)
    assert built["spec"]["cooldownPeriod"] == 60
    hpa = _model(autoscaling={"provider": "hpa", "scaleToZero": {}, "minReplicas": 0})
    built = build_autoscaler(_owner("PersonalizedModel"), hpa, [], NAMES)
    assert built is not None
    assert built["spec"]["minReplicas"] == 1


@pytest.mark.parametrize(
    ("network", "operator", "peers"),
    [
        ({}, None, ["own"]),
        ({}, "ops", ["own", "ops"]),
        ({}, "team", ["own"]),
        ({"namespaces": ["web", "team", "ops"]}, "ops", ["own", "ops", "web"]),
        ({"enabled": False}, "ops", None),
    ],
)
def test_who_may_call_a_server(network: Any, operator: str | None, peers: Any) -> None:
    defaults = Defaults("image", operator_namespace=operator)
    base = build_server_base(_owner("PersonalizedModel"), _model(network=network), defaults)
    policies = [m for m in base if m["kind"] == "NetworkPolicy"]
    if peers is None:
        assert policies == []
        return
    (rule,) = policies[0]["spec"]["ingress"]
    found = [
        p["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        if "namespaceSelector" in p
        else "own"
        for p in rule["from"]
    ]
    assert found == peers
    assert rule["ports"] == [{"port": "http", "protocol": "TCP"}]


@pytest.mark.parametrize(("namespace", "rules"), [(None, 0), ("ops", 1)])
def test_who_may_call_an_encoder(namespace: str | None, rules: int) -> None:
    defaults = Defaults("image", operator_namespace=namespace)
    base = build_encoder_base(_owner("MemoryStore"), _store(), defaults)
    (policy,) = [m for m in base if m["kind"] == "NetworkPolicy"]
    assert len(policy["spec"].get("ingress", [])) == rules
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_users_texts_are_not_expanded() -> None:
    assert literal("a$(HF_TOKEN)b$$c") == "a$$(HF_TOKEN)b$$$$c"
    spec = _model(model={"id": "m$(HF_TOKEN)"}, serving={"engineArgs": ["$(VLLM_API_KEY)"]})
    arguments = _pod(_generation(spec)[1])["containers"][0]["args"]
    assert "m$$(HF_TOKEN)" in arguments
    assert arguments[-1] == "$$(VLLM_API_KEY)"


def test_the_erasing_job_outlives_its_store_and_ends() -> None:
    job = build_erase_job(_owner("MemoryStore"), _store(), Defaults("image"))
    assert "ownerReferences" not in job["metadata"]
    assert job["spec"]["activeDeadlineSeconds"] == Defaults("image").erase_timeout_seconds
    assert job["spec"]["ttlSecondsAfterFinished"] == 300
    # The encoder's account goes with the store.
    assert _pod(job)["serviceAccountName"] == "default"


def _place(**fields: Any) -> S3Location:
    return S3Location.model_validate({"url": "s3://bucket/p"} | fields)


@pytest.mark.parametrize(
    ("second", "field"),
    [
        ({}, None),
        ({"url": "s3://other/p"}, None),
        ({"endpointUrl": "https://e"}, "endpointUrl"),
        ({"region": "r"}, "region"),
        ({"credentialsSecretRef": {"name": "c"}}, "credentialsSecretRef"),
    ],
)
def test_one_pod_has_one_access_to_object_storage(second: Any, field: str | None) -> None:
    problem = s3_conflict([("one", _place()), ("none", None), ("two", _place(**second))])
    assert (problem is None) == (field is None)
    if field:
        assert problem is not None
        assert f"two.{field} differs from one.{field}" in problem


def test_one_server_has_one_embedding_endpoint() -> None:
    first = _view("a", encoding={"embedder": "openai:m@https://one/v1"})
    other = _view("b", encoding={"embedder": "openai:m@https://two/v1"})
    assert embedder_conflict([_view("l"), first]) is None
    assert embedder_conflict([first, first]) is None
    problem = embedder_conflict([_view("l"), first, other])
    assert problem is not None
    assert "'a' and 'b'" in problem


def test_the_plan_is_mounted_and_its_content_is_not_part_of_the_pods() -> None:
    config, deployment = _generation(_model())
    plan = json.loads(config["data"]["config.json"])["tiers"]["plan_file"]
    [volume] = [v for v in _pod(deployment)["volumes"] if v["name"] == "plan"]
    assert volume["configMap"]["name"] == "x-plan"
    assert volume["configMap"]["optional"] is True
    [mount] = [m for m in _pod(deployment)["containers"][0]["volumeMounts"] if m["name"] == "plan"]
    # By a subPath the kubelet would never bring the file up to date.
    assert "subPath" not in mount
    assert plan == f"{mount['mountPath']}/{volume['configMap']['items'][0]['path']}"


def test_a_share_of_the_gpu_reaches_engine_and_arena() -> None:
    config, deployment = _generation(_model(), gpu=GpuShare(3 << 30, 0.8125))
    assert json.loads(config["data"]["config.json"])["tiers"]["gpu_bytes"] == 3 << 30
    arguments = _pod(deployment)["containers"][0]["args"]
    assert arguments[arguments.index("--gpu-memory-utilization") + 1] == "0.8125"
    plain_config, plain = _generation(_model())
    assert "gpu_bytes" not in json.loads(plain_config["data"]["config.json"])["tiers"]
    assert "--gpu-memory-utilization" not in _pod(plain)["containers"][0]["args"]


def test_a_changed_share_is_a_rolling_update_and_no_new_generation() -> None:
    before, after = _generation(_model()), _generation(_model(), gpu=GpuShare(1 << 30, 0.8))
    assert before[1]["metadata"]["name"] == after[1]["metadata"]["name"]
    assert before[1]["spec"]["template"] != after[1]["spec"]["template"]


@pytest.mark.parametrize(
    ("serving", "expected"),
    [
        ({}, False),
        ({"tensorParallelSize": 2}, True),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, True),
        ({"resources": {"requests": {"nvidia.com/gpu": 1}}}, True),
        ({"resources": {"limits": {"nvidia.com/mig-1g.10gb": 2}}, "tensorParallelSize": 2}, False),
        ({"resources": {"limits": {"amd.com/gpu": 2}}, "tensorParallelSize": 2}, False),
        ({"resources": {"limits": {"cpu": 4}}}, False),
    ],
)
def test_which_pods_get_whole_gpus(serving: dict[str, Any], expected: bool) -> None:
    spec = _model(serving=serving).serving
    assert asks_for_gpus(spec.resources, spec.tensor_parallel_size) is expected
