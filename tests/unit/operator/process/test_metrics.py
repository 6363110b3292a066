from __future__ import annotations

import json
import logging

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from inferscale_operator.cluster.cache import ChildCache
from inferscale_operator.desired.kinds import JOB
from inferscale_operator.handlers.hearing import Hearing
from inferscale_operator.handlers.work_queue import WorkQueue
from inferscale_operator.health import Health, build_application
from inferscale_operator.logs import JsonFormatter
from inferscale_operator.metrics import OperatorMetrics

A = ("MemoryStore", "ns", "a")
B = ("MemoryStore", "ns", "b")


def value(metrics: OperatorMetrics, name: str, /, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_conditions_are_counted_and_end_with_the_resource() -> None:
    metrics = OperatorMetrics(CollectorRegistry())
    metrics.conditions(A, {"Ready": "True"})
    metrics.conditions(B, {"Ready": "False", "Encoded": "Unknown"})
    metrics.conditions(A, {"Ready": "False"})
    count = "inferscale_operator_conditions"
    assert value(metrics, count, kind="MemoryStore", type="Ready", status="False") == 2
    assert value(metrics, count, kind="MemoryStore", type="Ready", status="True") == 0
    one = "inferscale_resource_condition"
    place = {"kind": "MemoryStore", "namespace": "ns"}
    assert value(metrics, one, **place, name="b", type="Encoded") == -1
    metrics.gone(B)
    metrics.gone(B)
    assert value(metrics, one, **place, name="b", type="Encoded") is None
    assert value(metrics, count, kind="MemoryStore", type="Ready", status="False") == 1


def test_queue_and_cache_are_read_when_asked() -> None:
    metrics, queue = OperatorMetrics(CollectorRegistry()), WorkQueue()
    metrics.follow(queue, ChildCache())
    assert value(metrics, "inferscale_operator_queue_depth") == 0
    queue.add(A)
    assert value(metrics, "inferscale_operator_queue_depth") == 1


@pytest.mark.asyncio
async def test_pages() -> None:
    metrics, health, hearing = OperatorMetrics(CollectorRegistry()), Health(), Hearing()
    health.live.append(hearing.deaf)
    health.before_metrics.append(lambda: metrics.read_hearing(hearing))
    async with TestClient(TestServer(build_application(health, metrics))) as client:
        assert (await client.get("/healthz")).status == 200
        answer = await client.get("/readyz")
        assert (answer.status, await answer.text()) == (503, "starting\n")
        health.not_ready, health.state = "", "standby"
        answer = await client.get("/readyz")
        assert (answer.status, await answer.text()) == (200, "ok: standby\n")
        hearing.heard(JOB)
        hearing.missed(JOB)
        hearing.missed(JOB)
        answer = await client.get("/healthz")
        assert answer.status == 503
        assert "the watch of Job" in await answer.text()
        text = await (await client.get("/metrics")).text()
        assert 'inferscale_operator_watch_age_seconds{kind="Job"}' in text


def test_log_lines_are_json_with_the_object_in_fields() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "created %s", ("Job",), None)
    record.kind, record.namespace, record.action = "Job", "ns", "created"
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "created Job"
    assert (line["kind"], line["namespace"], line["action"]) == ("Job", "ns", "created")
    assert "object" not in line
