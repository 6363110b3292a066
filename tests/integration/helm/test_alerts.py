"""Alerts fire when they should and only then; every panel of the dashboard shows something.

promtool evaluates rules and queries over made-up series, one sample a minute for 150 minutes.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.integration.helm.helm_binary import CHART, Helm
from tests.integration.helm.promtool import check_rules, evaluate, find_promtool
from tests.unit.metrics import registries

POD = 'namespace="n",pod="p"'
ZEROS = "0+0x150"
"""Not "0x150", which promtool reads as one sample in hexadecimal."""
Series = dict[str, str]

OPERATOR = "inferscale_operator_"
CONDITION = "inferscale_resource_condition"
REQUESTS = "inferscale_requests_total"
UNUSABLE = "inferscale_unusable_segments_total"
TTFT = "inferscale_time_to_first_token_seconds_bucket"

# Series with which an alert fires after two hours, and series with which it must not.
ALERTS: dict[str, tuple[Series, Series]] = {
    "InferScaleOperatorDown": (
        {f'{OPERATOR}leader{{pod="a"}}': ZEROS},
        {f'{OPERATOR}leader{{pod="a"}}': ZEROS, f'{OPERATOR}leader{{pod="b"}}': "1x150"},
    ),
    "InferScaleReconcileErrors": (
        {f'{OPERATOR}errors_total{{kind="MemoryStore",reason="Invalid"}}': "0+1x150"},
        {f'{OPERATOR}errors_total{{kind="MemoryStore",reason="Conflict"}}': "0+9x150"},
    ),
    "InferScaleQueueStuck": (
        {f"{OPERATOR}queue_age_seconds": "0+60x150"},
        {f"{OPERATOR}queue_age_seconds": "20x150"},
    ),
    "InferScaleApiServerErrors": (
        {
            f'{OPERATOR}api_requests_total{{verb="GET",code="200"}}': "0+80x150",
            f'{OPERATOR}api_requests_total{{verb="GET",code="error"}}': "0+10x150",
            f'{OPERATOR}api_requests_total{{verb="PATCH",code="503"}}': "0+10x150",
        },
        {
            f'{OPERATOR}api_requests_total{{verb="GET",code="200"}}': "0+80x150",
            f'{OPERATOR}api_requests_total{{verb="GET",code="404"}}': "0+20x150",
        },
    ),
    "InferScaleResourceNotReady": (
        {'inferscale_resource_condition{kind="MemoryStore",name="m",type="Ready"}': "-1x150"},
        {
            'inferscale_resource_condition{kind="MemoryStore",name="m",type="Ready"}': "1x150",
            'inferscale_resource_condition{kind="MemoryStore",name="m",type="Other"}': ZEROS,
        },
    ),
    "InferScaleEncodingStalled": (
        {
            f"inferscale_encode_pending_facts{{{POD}}}": "5x150",
            f'inferscale_encode_state{{{POD},state="encoding"}}': "1x150",
            f"inferscale_encode_encoded_facts_total{{{POD}}}": "7x150",
        },
        {
            f"inferscale_encode_pending_facts{{{POD}}}": "500-1x150",
            f'inferscale_encode_state{{{POD},state="encoding"}}': "1x150",
            f"inferscale_encode_encoded_facts_total{{{POD}}}": "0+1x150",
        },
    ),
    "InferScaleMemoryNotInjected": (
        {
            f'{REQUESTS}{{{POD},mode="text",reason="timeout"}}': "0+30x150",
            f'{REQUESTS}{{{POD},mode="injected",reason=""}}': "0+70x150",
        },
        {
            f'{REQUESTS}{{{POD},mode="text",reason=""}}': "0+30x150",
            f'{REQUESTS}{{{POD},mode="injected",reason="segment_missing"}}': "0+70x150",
        },
    ),
    "InferScaleMemoryFarFromText": (
        {f'inferscale_canary_degraded{{{POD},store="s"}}': "0+0x30 1x120"},
        {
            f'inferscale_canary_degraded{{{POD},store="s"}}': ZEROS,
            f'inferscale_canary_kl{{{POD},store="s"}}': "3x150",
        },
    ),
    "InferScaleDamagedSegments": (
        {f'{UNUSABLE}{{{POD},reason="damaged"}}': "_x100 1x50"},
        {
            f'{UNUSABLE}{{{POD},reason="damaged"}}': "1x150",
            f'{UNUSABLE}{{{POD},reason="missing"}}': "0+9x150",
        },
    ),
    "InferScaleStagingTimeouts": (
        {
            f'{UNUSABLE}{{{POD},reason="timeout"}}': "0+10x150",
            f'{REQUESTS}{{{POD},mode="injected",reason=""}}': "0+100x150",
        },
        {
            f'{UNUSABLE}{{{POD},reason="timeout"}}': "0+2x150",
            f'{REQUESTS}{{{POD},mode="injected",reason=""}}': "0+100x150",
        },
    ),
    "InferScaleArenaTooSmall": (
        {
            f'inferscale_store_hits_total{{{POD},store="s"}}': "0+10x150",
            f'inferscale_store_misses_total{{{POD},store="s"}}': "0+20x150",
            f'inferscale_store_evictions_total{{{POD},store="s"}}': "0+20x150",
        },
        {
            f'inferscale_store_hits_total{{{POD},store="s"}}': "0+10x150",
            f'inferscale_store_misses_total{{{POD},store="s"}}': "0+20x150",
            f'inferscale_store_evictions_total{{{POD},store="s"}}': ZEROS,
        },
    ),
    "InferScaleTierPlanRefused": (
        {f"inferscale_tier_plan_valid{{{POD}}}": ZEROS},
        {f"inferscale_tier_plan_valid{{{POD}}}": "1x150"},
    ),
    "InferScaleGpuUnseen": (
        {f"inferscale_nvml_up{{{POD}}}": "1x100 0+0x50"},
        {f"inferscale_nvml_up{{{POD}}}": ZEROS},
    ),
    "InferScaleSlowFirstToken": (
        {
            f'{TTFT}{{{POD},mode="text",le="1"}}': "0+1x150",
            f'{TTFT}{{{POD},mode="text",le="10"}}': "0+10x150",
            f'{TTFT}{{{POD},mode="text",le="+Inf"}}': "0+10x150",
        },
        {
            f'{TTFT}{{{POD},mode="text",le="1"}}': "0+10x150",
            f'{TTFT}{{{POD},mode="text",le="10"}}': "0+10x150",
            f'{TTFT}{{{POD},mode="text",le="+Inf"}}': "0+10x150",
        },
    ),
    "InferScaleRouterNotReady": (
        {'inferscale_resource_condition{namespace="n",name="m",type="RouterReady"}': ZEROS},
        {
            'inferscale_resource_condition{namespace="n",name="m",type="RouterReady"}': "1x150",
            'inferscale_resource_condition{namespace="n",name="m",type="Ready"}': ZEROS,
        },
    ),
    "InferScaleRequestsWaiting": (
        {
            f'vllm:num_requests_waiting{{{POD},model_name="m"}}': "20x150",
            f'vllm:num_requests_running{{{POD},model_name="m"}}': "5x150",
        },
        {
            f'vllm:num_requests_waiting{{{POD},model_name="m"}}': "20x150",
            f'vllm:num_requests_running{{{POD},model_name="m"}}': "50x150",
        },
    ),
    "InferScaleMetricsMissing": (
        {f'{CONDITION}{{name="m",type="MetricsAvailable"}}': ZEROS},
        {
            f'{CONDITION}{{name="a",type="MetricsAvailable"}}': "1x150",
            f'{CONDITION}{{name="b",type="MetricsAvailable"}}': "-1x150",
        },
    ),
    "InferScaleRequestsRefused": (
        {f'inferscale_activator_requests_total{{{POD},result="timeout"}}': "0+1x150"},
        {f'inferscale_activator_requests_total{{{POD},result="forwarded"}}': "0+1x150"},
    ),
    "InferScaleKvCacheFull": (
        {
            f'vllm:kv_cache_usage_perc{{{POD},engine="0"}}': "0.97x150",
            f'vllm:num_preemptions_total{{{POD},engine="0"}}': "0+1x150",
        },
        {
            f'vllm:kv_cache_usage_perc{{{POD},engine="0"}}': "0.97x150",
            f'vllm:num_preemptions_total{{{POD},engine="0"}}': "3x150",
        },
    ),
}


@pytest.fixture(scope="module")
def tool() -> Path:
    return find_promtool()


@pytest.fixture(scope="module")
def groups(helm: Helm) -> dict[str, Any]:
    """The groups as the chart installs them."""
    settings = ("--set", "monitoring.prometheusRule.enabled=true")
    manifests = helm.template(*settings, "--api-versions", "monitoring.coreos.com/v1")
    (rule,) = (item for item in manifests if item["kind"] == "PrometheusRule")
    return dict(rule["spec"])


def names(groups: dict[str, Any]) -> list[str]:
    return [rule["alert"] for group in groups["groups"] for rule in group["rules"]]


def test_prometheus_takes_the_rules(tool: Path, groups: dict[str, Any], tmp_path: Path) -> None:
    found = re.findall(r"SUCCESS: (\d+) rules found", check_rules(tool, groups, tmp_path))
    assert found == [str(len(ALERTS))]
    assert sorted(names(groups)) == sorted(ALERTS)


def _case(alert: str, series: Series, *, fires: bool) -> dict[str, Any]:
    expression = f'count by (alertname) (ALERTS{{alertname="{alert}",alertstate="firing"}})'
    sample = {"labels": f'{{alertname="{alert}"}}', "value": 1}
    return {
        "name": f"{alert} {'fires' if fires else 'is quiet'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [
            {"expr": expression, "eval_time": "2h", "exp_samples": [sample] if fires else []}
        ],
    }


def test_alerts_fire_when_they_should_and_only_then(
    tool: Path, groups: dict[str, Any], tmp_path: Path
) -> None:
    cases = [
        _case(alert, series, fires=fires)
        for alert, pair in ALERTS.items()
        for series, fires in zip(pair, (True, False), strict=True)
    ]
    assert "SUCCESS" in evaluate(tool, groups, cases, tmp_path)


def test_a_quiet_alert_would_be_noticed(tool: Path, groups: dict[str, Any], tmp_path: Path) -> None:
    _, quiet = ALERTS["InferScaleQueueStuck"]
    case = _case("InferScaleQueueStuck", quiet, fires=True)
    with pytest.raises(AssertionError, match="got: nil"):
        evaluate(tool, groups, [case], tmp_path)


VALUES = {
    "namespace": ("n",),
    "mode": ("injected", "text"),
    "reason": ("", "timeout"),
    "state": ("encoding",),
    "type": ("Ready",),
    "le": ("0.1", "1", "+Inf"),
    "model_name": ("m",),
}
"""Values of labels; others have one of no meaning."""


def every_series() -> Series:
    """Every metric of ours, and those of vLLM that the dashboard asks for, with samples."""
    labels: dict[str, list[str]] = {}
    for registry in registries.ALL:
        for metric in registry():
            for name in metric.series:
                labels[name] = [*metric.labels, *(["le"] if name.endswith("_bucket") else [])]
    text = (CHART / "files" / "dashboards" / "inferscale.json").read_text()
    for name in set(re.findall(r"vllm:\w+", text)):
        labels[name] = ["model_name", *(["le"] if name.endswith("_bucket") else [])]
    found = {}
    for name, keys in labels.items():
        grows = name.endswith(("_total", "_bucket", "_sum", "_count"))
        zero = name == "inferscale_resource_condition"
        for chosen in itertools.product(*(VALUES.get(key, ("x",)) for key in keys)):
            given = {"namespace": "n", "pod": "p"} | dict(zip(keys, chosen, strict=True))
            shown = ",".join(f'{key}="{value}"' for key, value in given.items())
            found[f"{name}{{{shown}}}"] = "0+5x150" if grows else (ZEROS if zero else "1x150")
    return found


def test_every_query_of_the_dashboard_returns_data(
    tool: Path, groups: dict[str, Any], tmp_path: Path
) -> None:
    text = (CHART / "files" / "dashboards" / "inferscale.json").read_text()
    checks = []
    for panel in json.loads(text)["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"].replace("$__rate_interval", "5m").replace("$namespace", "n|o")
            sample = {"labels": "{}", "value": 1}
            # A comparison would drop NaN; so does this one, and a quotient must not be 0 / 0.
            expression = f"count(({query}) >= 0) > bool 0"
            checks.append({"expr": expression, "eval_time": "2h", "exp_samples": [sample]})
    assert len(checks) > 40
    series = [{"series": name, "values": values} for name, values in every_series().items()]
    case = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    assert "SUCCESS" in evaluate(tool, groups, [case], tmp_path)
