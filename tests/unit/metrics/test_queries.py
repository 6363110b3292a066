"""Every query of the dashboard and the alerts is valid and asks for what exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metric_registries as registries
import pytest
import yaml

promql = pytest.importorskip("promql_parser", reason="promql-parser reads the queries")

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "inferscale"
RUNBOOKS = ROOT / "docs" / "runbooks"
TARGET_LABELS = {"namespace", "pod"}
"""Labels that Prometheus adds and that docs/metrics.md promises."""
VLLM_LABELS = {"model_name", "engine", "le"}
_ENDINGS = re.compile(r"_(total|bucket|sum|count)$")


def dashboard() -> dict[str, Any]:
    text = (CHART / "files" / "dashboards" / "inferscale.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def alerts() -> dict[str, dict[str, Any]]:
    text = (CHART / "files" / "alerts.yaml").read_text(encoding="utf-8")
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    return {rule["alert"]: rule for rule in rules}


def _queries() -> dict[str, str]:
    found = {name: rule["expr"] for name, rule in alerts().items()}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            # Grafana replaces these before Prometheus sees them.
            expression = target["expr"].replace("$__rate_interval", "5m")
            found[f"{panel['title']} {target['refId']}"] = expression.replace("$namespace", ".*")
    return found


QUERIES = _queries()
SERIES = {
    name: set(metric.labels) | ({"le"} if name.endswith("_bucket") else set())
    for registry in registries.ALL
    for metric in registry()
    for name in metric.series
}


class Reader:
    """Collects what an expression asks for."""

    def __init__(self, expression: str) -> None:
        self.names: set[str] = set()
        self.matched: dict[str, set[str]] = {}
        self.grouped: set[str] = set()
        promql.walk(promql.parse(expression), self._visit)

    def _visit(self, node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            self.names.add(node.name)
            matchers = {matcher.name for matcher in node.matchers.matchers}
            self.matched.setdefault(node.name, set()).update(matchers)
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            self.grouped |= set(node.modifier.labels)


@pytest.mark.parametrize("title", QUERIES)
def test_query_asks_for_metrics_and_labels_that_exist(title: str) -> None:
    read = Reader(QUERIES[title])
    assert read.names
    foreign = registries.vllm()
    known: set[str] = set(TARGET_LABELS)
    for name in read.names:
        if name.startswith("vllm:"):
            if foreign is None:
                pytest.skip("vLLM is not installed: its metric names were not compared")
            assert _ENDINGS.sub("", name) in foreign
            labels = VLLM_LABELS
        else:
            assert name in SERIES, f"{name} is no series of the code"
            labels = SERIES[name]
        assert read.matched[name] <= labels | TARGET_LABELS
        known |= labels
    assert read.grouped <= known


def test_a_renamed_metric_would_be_noticed() -> None:
    read = Reader('sum by (pod) (rate(inferscale_gone_total{mode="text"}[5m]))')
    assert read.names == {"inferscale_gone_total"}
    assert not read.names & SERIES.keys()
    assert (read.grouped, read.matched) == ({"pod"}, {"inferscale_gone_total": {"mode"}})


@pytest.mark.parametrize("name", alerts())
def test_alert_says_what_and_has_a_page(name: str) -> None:
    rule = alerts()[name]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description"}
    page = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}\n")
    for part in ("**Effect.**", "**Look.**", "**Mend"):
        assert part in page
    labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    read = Reader(rule["expr"])
    given = read.grouped | set().union(*(SERIES.get(item, set()) for item in read.names))
    assert labels <= given | (set() if read.grouped else TARGET_LABELS)


def test_every_page_belongs_to_an_alert_and_links_to_pages() -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in RUNBOOKS.glob("*.md")}
    assert pages.keys() == alerts().keys()
    for text in pages.values():
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert (RUNBOOKS / link).is_file(), link


def _panels() -> Iterator[dict[str, Any]]:
    for panel in dashboard()["panels"]:
        if panel["type"] != "row":
            yield panel


def test_panels_do_not_overlap_and_ask_the_chosen_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    identifiers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    for panel in _panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_dashboard_shows_what_a_fleet_is_judged_by() -> None:
    names = set().union(*(Reader(QUERIES[title]).names for title in QUERIES))
    for name in (
        "vllm:time_to_first_token_seconds_bucket",
        "inferscale_requests_total",
        "inferscale_store_hits_total",
        "inferscale_staging_seconds_bucket",
        "inferscale_dram_arena_budget_bytes",
        "inferscale_gpu_memory_used_bytes",
        "inferscale_encode_pending_facts",
        "inferscale_operator_reconciles_total",
    ):
        assert name in names
