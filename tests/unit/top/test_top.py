"""``inferscale top`` against real HTTP servers that give real reports."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.nvml import DeviceMemory, NvmlSample, NvmlSampler
from inferscale_runtime.tiers.arena import Arena
from inferscale_runtime.tiers.arena_use import ByteLimits
from inferscale_runtime.tiers.device_arena import DeviceFigures
from inferscale_runtime.tiers.plan_file import PlanFollower
from inferscale_runtime.tiers.report import TierReport
from inferscale_runtime.tiers.slab import NUM_LEASES
from inferscale_runtime.top import cli
from inferscale_runtime.top.fetch import Answer, check_url, expand
from inferscale_runtime.top.view import format_size, render

Serve = Callable[[Callable[[str], tuple[int, bytes]]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = []

    def start(answer: Callable[[str], tuple[int, bytes]]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/inferscale/v1/status"
                code, body = answer(self.headers.get("authorization", ""))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def arena() -> Arena:
    arena = Arena(torch.zeros((1024, 1, 2, 1, 128)), np.zeros((NUM_LEASES, 2), np.int64))
    arena.set_limits(None, {"support": ByteLimits(100 * 1024, None, "gpu")})
    return arena


def report(arena: Arena) -> dict[str, Any]:
    sampler = NvmlSampler(lambda: 10.0)
    device = DeviceMemory("0", "GPU-0", "Fake H1", 80 << 30, 61 << 30, 19 << 30)
    sampler._last = NvmlSample(7.0, None, (device,))
    status = TierReport(arena, PlanFollower("", arena), sampler).status()
    return {"version": "0", "reason": None, **status}


def cells(text: str, first: str) -> list[str]:
    """Cells of the line that starts with a cell."""
    line = next(line for line in text.splitlines() if line.split()[1:2] == [first])
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.register(parser.add_subparsers())
    parsed = parser.parse_args(["top", *arguments])
    return int(parsed.func(parsed))


def test_once_shows_tiers_hits_and_gpus(
    serve: Serve, arena: Arena, capsys: pytest.CaptureFixture[str]
) -> None:
    arena.put("k", torch.zeros((10, 1, 2, 1, 128)), store="support")
    arena.look_up(["k", "l", "m", "n"], store="support")
    url = serve(lambda _: (200, json.dumps(report(arena)).encode()))
    assert run("--once", "--url", url) == 0
    output = capsys.readouterr().out
    pod = url.removeprefix("http://")
    assert cells(output, "10.0Ki/1.0Mi")[:4] == [pod, "10.0Ki/1.0Mi", "0B", "25.0"]
    assert cells(output, "support")[2:8] == ["gpu", "10.0Ki", "100Ki", "-", "1", "25.0"]
    assert cells(output, "0")[1:] == ["0", "Fake H1", "61.0Gi", "80.0Gi", "19.0Gi", "0", "3"]
    assert "\x1b" not in output


def test_a_server_that_does_not_answer_is_a_row_and_a_status(
    serve: Serve, arena: Arena, capsys: pytest.CaptureFixture[str]
) -> None:
    good = serve(lambda _: (200, json.dumps(report(arena)).encode()))
    forbidden = serve(lambda _: (401, b""))
    garbled = serve(lambda _: (200, b"<html>"))
    listing = serve(lambda _: (200, b"[]"))
    urls = [good, forbidden, garbled, listing, "http://127.0.0.1:1"]
    assert run("--once", *(a for url in urls for a in ("--url", url))) == 1
    output = capsys.readouterr().out
    for text in ("HTTP 401", "no JSON", "no status document", "refused"):
        assert text in output
    assert output.count("no answer") == 4


def test_the_key_is_sent(serve: Serve, tmp_path: Path) -> None:
    seen = []

    def answer(authorization: str) -> tuple[int, bytes]:
        seen.append(authorization)
        return 200, b"{}"

    url = serve(answer)
    key = tmp_path / "key"
    key.write_text("secret\n")
    assert run("--once", "--url", url, "--api-key-file", str(key)) == 0
    assert run("--once", "--url", url) == 0
    assert seen == ["Bearer secret", ""]


def test_it_refreshes_until_interrupted(
    serve: Serve, arena: Arena, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve(lambda _: (200, json.dumps(report(arena)).encode()))
    arena.look_up(["l"], store="support")
    rounds = 0

    def sleep(_: float) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            raise KeyboardInterrupt
        arena.put("k", torch.zeros((1, 1, 2, 1, 128)), store="support")
        arena.look_up(["k"], store="support")

    monkeypatch.setattr(cli.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        run("--url", url)
    first, second = capsys.readouterr().out.split("POD  ")[1::3]
    assert " 0.0 " in first, "one miss since the start"
    assert " 100.0 " in second, "one hit since the first look"


def test_rates_are_since_the_answer_before() -> None:
    def answer(hits: int, misses: int, staged: int, at: float) -> Answer:
        store = {"hits": hits, "misses": misses, "staged_bytes": staged}
        return Answer("p", at, {"tiers": {"stores": {"s": store}}})

    before = {"p": answer(100, 0, 1000, 10)}
    row = cells(render([answer(130, 10, 5096, 12)], before, 500), "-/-")
    assert row[3:6] == ["75.0", "20.0", "2.0Ki"]
    restarted = cells(render([answer(1, 1, 0, 12)], before, 500), "-/-")
    assert restarted[3:6] == ["50.0", "-", "-"]


def test_the_gpu_arena_is_shown_where_there_is_one(arena: Arena) -> None:
    figures = DeviceFigures(64 << 20, 32 << 20, 8 << 20, 30, 10, 4 << 20, 7)
    with_one = report(arena)
    with_one["tiers"]["gpu"] = asdict(figures)
    answers = [Answer("p", 12, with_one), Answer("q", 12, report(arena))]
    text = render(answers, {}, 500)
    assert text.count("GPU ARENA") == 1
    assert cells(text, "8.0Mi/32.0Mi") == ["p", "8.0Mi/32.0Mi", "75.0", "-", "7"]
    table = text.split("GPU ARENA")[1].split("\n\n")[0]
    assert len(table.splitlines()) == 2, "one pod has one"

    later = report(arena)
    later["tiers"]["gpu"] = asdict(replace(figures, hits=39, misses=11, copied_bytes=6 << 20))
    before = {"p": answers[0]}
    row = cells(render([Answer("p", 16, later)], before, 500), "8.0Mi/32.0Mi")
    assert row[2:4] == ["90.0", "512Ki"]
    restarted = report(arena)
    restarted["tiers"]["gpu"] = asdict(replace(figures, hits=1, misses=1, copied_bytes=5))
    row = cells(render([Answer("p", 16, restarted)], before, 500), "8.0Mi/32.0Mi")
    assert row[2:4] == ["50.0", "-"]
    assert "GPU ARENA" not in render([Answer("q", 12, report(arena))], {}, 500)


def test_what_comes_over_the_network_cannot_steer_the_terminal() -> None:
    document = {
        "reason": "\x1b[2Jgone\n",
        "tiers": {
            "stores": {"\x07bell": {"tier": "\x9b31m", "heat": "hot"}},
            "plan": 5,
            "gpu": {"evictions": "\x1b[31m", "used_bytes": "many", "hits": "few"},
        },
        "gpu": {"up": True, "devices": [{"name": "\x1b]0;x"}, 4], "age_seconds": "old"},
    }
    text = render([Answer("p", 0, document)], {}, 500)
    assert all(c.isprintable() for line in text.splitlines() for c in line)
    assert "?[2Jgone?" in text


def test_lines_are_cut_to_the_width() -> None:
    text = render([Answer("p" * 300, 0, {}, "refused")], {}, 40)
    assert max(len(line) for line in text.splitlines()) <= 40


def test_a_driver_without_figures_is_named() -> None:
    document = {"gpu": {"up": False, "reason": "Driver Not Loaded"}}
    assert "no figures: Driver Not Loaded" in render([Answer("p", 0, document)], {}, 500)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0B"),
        (999, "999B"),
        (1000, "1.0Ki"),
        (1536, "1.5Ki"),
        (500 << 20, "500Mi"),
        (61 << 30, "61.0Gi"),
        (1 << 70, "1048576Pi"),
        (None, "-"),
        (True, "-"),
        ("8", "-"),
    ],
)
def test_sizes(value: Any, text: str) -> None:
    assert format_size(value) == text


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        check_url(url)


@pytest.mark.parametrize("arguments", [["--interval", "0"], ["--timeout", "-1"]])
def test_bad_times_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=arguments[0]):
        run("--once", *arguments)


def test_every_address_of_a_name_is_a_pod() -> None:
    assert "http://127.0.0.1:81" in expand("http://localhost:81")
    with pytest.raises(ConfigError, match="the host name is not known"):
        expand(f"http://{'x' * 70}")
