"""A real Prometheus over the whole system, asked what the dashboard and the alerts ask."""

from __future__ import annotations

import json
import math
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from tests.integration.helm.promtool import find
from tests.integration.kube.control_plane import ROOT, eventually
from tests.integration.ports import free_port

FILES = ROOT / "charts" / "inferscale" / "files"
_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Target = tuple[str, dict[str, str]]
"""``host:port`` and labels."""

EMPTY = {
    "GPU memory": "this machine has no GPU",
    "Why not injected": "a request that is injected as asked for has no reason",
    "Segments that went as text": "the series begin with the first one",
    "Failed passes": "the series begin with the first one",
    "InferScaleReconcileErrors": "the series begin with the first one",
    "InferScaleMemoryNotInjected": "the series with a reason begin with the first one",
    "Canary: distance from text": "the model has no canary",
    "Canary: same best token": "the model has no canary",
    "Canary: stores served as text": "the model has no canary",
    "InferScaleMemoryFarFromText": "the model has no canary",
    "InferScaleDamagedSegments": "nothing is damaged",
    "InferScaleStagingTimeouts": "nothing took too long",
    "InferScaleRequestsRefused": "the series begin with the first one",
    "InferScaleRouterNotReady": "the model has no router: its router is started beside it",
    "InferScaleApiServerErrors": "the API server may have answered every request well",
}
"""Panels and alerts some of whose series a healthy system without a GPU does not have, and why."""


def dashboard_queries() -> list[tuple[str, str]]:
    """Titles and queries of all panels, with Grafana's variables filled in."""
    text = (FILES / "dashboards" / "inferscale.json").read_text()
    return [
        (
            panel["title"],
            target["expr"].replace("$__rate_interval", "30s").replace("$namespace", ".*"),
        )
        for panel in json.loads(text)["panels"]
        for target in panel.get("targets", [])
    ]


def alert_selectors() -> list[tuple[str, str]]:
    """Names of alerts and every series that they ask for; the alerts themselves should be quiet."""
    found: list[tuple[str, str]] = []
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:

            def visit(node: Any, name: str = rule["alert"]) -> None:
                if isinstance(node, promql_parser.VectorSelector):
                    matchers = [
                        f"{item.name}{_OPERATORS[str(item.op)]}{json.dumps(item.value)}"
                        for item in node.matchers.matchers
                    ]
                    found.append((name, f"{node.name}{{{','.join(matchers)}}}"))

            promql_parser.walk(promql_parser.parse(rule["expr"]), visit)
    return found


_OPERATORS = {
    "MatchOp.Equal": "=",
    "MatchOp.NotEqual": "!=",
    "MatchOp.Re": "=~",
    "MatchOp.NotRe": "!~",
}


class Prometheus:
    """A Prometheus that scrapes every second what ``targets`` says at the time.

    Args:
        folder: For its data.
        targets: Where there is something to scrape now.
    """

    def __init__(self, folder: Path, targets: Callable[[], list[Target]]) -> None:
        self._port = free_port()
        self._targets, self._file = targets, folder / "targets.json"
        self._write()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(FILES / "alerts.yaml")],
            "scrape_configs": [
                {
                    "job_name": "system",
                    # Labels `namespace` of the operator's metrics mean the resource's.
                    "honor_labels": True,
                    "file_sd_configs": [{"files": [str(self._file)], "refresh_interval": "1s"}],
                }
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    str(find("prometheus")),
                    f"--config.file={folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={folder / 'prometheus'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=output,
                stderr=output,
            )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _write(self) -> None:
        entries = [{"targets": [place], "labels": labels} for place, labels in self._targets()]
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps(entries))
        temporary.rename(self._file)

    def _follow(self) -> None:
        while not self._stop.wait(2):
            self._write()

    def get(self, path: str, **query: str) -> Any:
        """``data`` of an answer of its API."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with _OPEN.open(url, timeout=30) as answer:
            return json.loads(answer.read())["data"]

    def has_had(self, query: str) -> bool:
        """Whether a query had an answer, a number, at any time of the last quarter of an hour."""
        # A comparison drops NaN: a quantile of nothing.
        result = self.get("query", query=f"count_over_time((({query}) > -1)[15m:5s])")["result"]
        return any(not math.isnan(float(item["value"][1])) for item in result)

    def unhealthy_rules(self) -> dict[str, str]:
        """Alerts that cannot be evaluated, and why."""
        rules = [rule for group in self.get("rules")["groups"] for rule in group["rules"]]
        return {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.process.terminate()
        self.process.wait(30)

    def assert_everything_answers(self) -> None:
        """Every panel and every series of an alert has data, but for those in ``EMPTY``."""
        asked = [*dashboard_queries(), *alert_selectors()]
        assert len(asked) > 60
        missing = [(n, query) for n, query in asked if n not in EMPTY and not self.has_had(query)]
        assert missing == []
        eventually(lambda: not self.unhealthy_rules(), "Prometheus can evaluate every alert")


@contextmanager
def running_prometheus(folder: Path, targets: Callable[[], list[Target]]) -> Iterator[Prometheus]:
    """A Prometheus for the length of a block."""
    prometheus = Prometheus(folder, targets)
    try:
        yield prometheus
    finally:
        prometheus.stop()
